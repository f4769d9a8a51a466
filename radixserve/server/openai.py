"""The OpenAI routes: POST /v1/completions and GET /v1/models."""

import asyncio
import logging
import secrets
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import IntArray, Request, SamplingParams
from radixserve.errors import InvalidRequestError, ModelNotFoundError
from radixserve.server.completion_call import CompletionCall, parse_completion_call
from radixserve.server.context import DEFAULT_MODEL_ALIAS, ServerContext
from radixserve.server.fields import read_object
from radixserve.server.generation import ChoiceDelta, Generation
from radixserve.server.replies import describe, error_body, json_reply
from radixserve.server.stream import DONE_EVENT, EventStream, event, until_gone

logger = logging.getLogger("radixserve.server")

# From here on encoding the texts of one call is worth a thread: the loop has other streams to serve.
_LONG_TEXT_CHARS = 8192


def openai_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model_card() -> dict[str, Any]:
        return {
            "id": context.served_name,
            "object": "model",
            "created": created,
            "owned_by": "radixserve",
            "root": context.served_name,
            "parent": None,
            "max_model_len": context.engine.info.context_length,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_reply({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name not in (context.served_name, DEFAULT_MODEL_ALIAS):
            raise ModelNotFoundError(f"model: expected {context.served_name} or {DEFAULT_MODEL_ALIAS}, got {name[:100]}", param="model")
        return json_reply(model_card())

    @router.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        started_at = time.monotonic()
        body = await read_object(http, context.config.max_body_bytes)
        call = parse_completion_call(body, context.engine.info.vocab_size, context.check_length, context.config)
        context.check_model(call.model)
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        requests = await _make_requests(context, call, completion_id)
        generation = Generation(context.engine, context.tokenizer, requests, call.n, context.latency, started_at)
        reply = _CompletionReply(call, generation, completion_id, context.served_name)
        try:
            headers = context.ignored_header(call.ignored)
            if not call.is_stream:
                return json_reply(await until_gone(http.receive, reply.whole()), headers=headers)
            # What the engine refuses is refused with a status, not inside a stream: so the first news come before the 200.
            deltas = generation.deltas()
            first = await until_gone(http.receive, _next(deltas))
            return EventStream(reply.events(first, deltas), generation.close, headers)
        except BaseException:
            generation.close()
            raise

    return router


async def _next(deltas: AsyncGenerator[ChoiceDelta]) -> ChoiceDelta:
    return await anext(deltas)


async def _make_requests(context: ServerContext, call: CompletionCall, completion_id: str) -> list[Request]:
    """A seed of the client's is that of every prompt, so that each answer is the one that its prompt would get alone."""
    prompts = await _encode_all(context, call.prompts)
    for prompt_ids in prompts:
        context.check_length(len(prompt_ids), call.sampling.max_tokens)
    seeds = [_concrete_seed(call.sampling) for _ in prompts]  # the n choices of a prompt differ by their choice index
    return [
        Request(f"{completion_id}-{i * call.n + k}", prompt_ids, call.sampling, seed, k, call.namespace)
        for i, (prompt_ids, seed) in enumerate(zip(prompts, seeds))
        for k in range(call.n)
    ]


async def _encode_all(context: ServerContext, prompts: Sequence[str | IntArray]) -> list[IntArray]:
    def encode_all() -> list[IntArray]:
        return [array("i", context.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt for prompt in prompts]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        context.check_text(text)
    num_chars = sum(map(len, texts))
    encoded = encode_all() if num_chars < _LONG_TEXT_CHARS else await asyncio.to_thread(encode_all)
    if not all(encoded):
        raise InvalidRequestError("prompt: expected at least one token, got an empty string", param="prompt")
    return encoded


def _concrete_seed(sampling: SamplingParams) -> int:
    return secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64


class _CompletionReply:
    """The text_completion objects of one call."""

    def __init__(self, call: CompletionCall, generation: Generation, completion_id: str, model: str) -> None:
        self._call = call
        self._generation = generation
        self._head = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        num_choices = len(self._call.prompts) * self._call.n
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        reasons: list[str | None] = [None] * num_choices
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.choice_index].append(delta.text)
                reasons[delta.choice_index] = delta.finish_reason
        choices = [_choice(index, "".join(texts[index]), reasons[index]) for index in range(num_choices)]
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    async def events(self, first: ChoiceDelta, deltas: AsyncGenerator[ChoiceDelta]) -> AsyncGenerator[bytes]:
        """Ends with [DONE] in every case; a failure is an error event before it."""
        try:
            yield self._chunk(first)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield self._chunk(delta)
            if self._call.include_usage:
                yield event({**self._head, "choices": [], "usage": self._generation.usage()})
        except Exception as error:
            reply = describe(error)
            if reply.http_status == 500:
                logger.exception("%s failed in its stream", self._head["id"])
            yield event(error_body(reply))
        yield DONE_EVENT

    def _chunk(self, delta: ChoiceDelta) -> bytes:
        body = {**self._head, "choices": [_choice(delta.choice_index, delta.text, delta.finish_reason)]}
        if self._call.continuous_usage:
            body["usage"] = self._generation.usage()
        return event(body)


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
