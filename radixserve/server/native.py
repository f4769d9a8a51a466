"""SGLang's native route: POST or PUT /generate."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import TokenLogprob
from radixserve.server.answering import answer
from radixserve.server.call import limits_of, start_generation
from radixserve.server.context import ServerContext
from radixserve.server.fields import read_object
from radixserve.server.generation import ChoiceDelta, Generation, joined
from radixserve.server.logprobs import native_logprob
from radixserve.server.native_call import NativeCall, parse_native_call
from radixserve.tokenizer import Tokenizer


def native_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    @router.put("/generate")
    async def generate(http: HttpRequest) -> Response:
        started_at = time.monotonic()
        body = await read_object(http, context.config.max_body_bytes)
        asked = parse_native_call(body, limits_of(context))
        call_id = uuid.uuid4().hex
        generation = await start_generation(context, asked.call, call_id, started_at)
        return await answer(http, context, asked.call, generation, NativeReply(asked, generation, context.tokenizer, call_id))

    return router


class NativeReply:
    """Each event holds the whole of its choice so far: SGLang's streams are cumulative."""

    def __init__(self, asked: NativeCall, generation: Generation, tokenizer: Tokenizer, call_id: str) -> None:
        self._asked = asked
        self._generation = generation
        self._tokenizer = tokenizer
        self._call_id = call_id
        self._so_far: dict[int, ChoiceDelta] = {}

    def whole(self, choices: list[ChoiceDelta]) -> Any:
        bodies = [self._body(choice) for choice in choices]
        return bodies if self._asked.is_batch else bodies[0]

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        index = delta.choice_index
        earlier = self._so_far.get(index)
        so_far = self._so_far[index] = delta if earlier is None else joined([earlier, delta])
        body = self._body(so_far)
        return [{"index": index, **body} if self._asked.is_batch else body]

    def last_chunks(self) -> list[Any]:
        return []

    def _body(self, choice: ChoiceDelta) -> dict[str, Any]:
        counts = self._generation.counts(choice.choice_index)
        meta: dict[str, Any] = {
            "id": self._id(choice.choice_index),
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "cached_tokens": counts.cached,
            "cached_tokens_details": {"device": counts.cached, "host": 0},
        }
        if (num_pinned := self._generation.num_pinned(choice.choice_index)) is not None:
            meta["pinned_tokens"] = num_pinned
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._generation.started_at
        if self._asked.return_logprob:
            meta |= self._logprobs(choice)
        return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}

    def _id(self, index: int) -> str:
        """The caller's name for the prompt; ours tells the choices apart."""
        if self._asked.call.ids:
            return self._asked.call.ids[index // self._asked.call.n]
        return f"{self._call_id}-{index}" if self._asked.is_batch else self._call_id

    def _logprobs(self, choice: ChoiceDelta) -> dict[str, Any]:
        index = choice.choice_index
        start = self._asked.prompt_start(index)
        inputs: list[TokenLogprob | int] = []
        if start is not None:
            # nothing precedes the first token of a prompt: its entry is an id without a number
            inputs = [*self._generation.prompt_ids(index)[:1], *choice.prompt_logprobs] if start == 0 else [*choice.prompt_logprobs]
        meta: dict[str, Any] = {
            "input_token_logprobs": [self._entry(entry) for entry in inputs],
            "output_token_logprobs": [self._entry(entry) for entry in choice.logprobs],
        }
        if self._asked.num_top(index):
            meta["input_top_logprobs"] = [self._top(entry) for entry in inputs]
            meta["output_top_logprobs"] = [self._top(entry) for entry in choice.logprobs]
        return meta

    def _entry(self, entry: TokenLogprob | int) -> list[Any]:
        token_id, logprob = (entry, None) if isinstance(entry, int) else (entry.token_id, entry.logprob)
        return native_logprob(self._tokenizer, token_id, logprob, self._asked.with_text)

    def _top(self, entry: TokenLogprob | int) -> list[list[Any]] | None:
        if isinstance(entry, int):
            return None
        return [native_logprob(self._tokenizer, token_id, logprob, self._asked.with_text) for token_id, logprob in entry.top]


def _finish_reason(choice: ChoiceDelta) -> dict[str, Any] | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case reason:
            return {"type": reason, "matched": choice.matched}
