"""SGLang's native route: POST or PUT /generate.

Its streams are cumulative: the last event alone is the whole answer, so every event holds the log-probabilities of the prompt again.
They are encoded once, and those of the output as they come.
"""

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import TokenLogprob
from radixserve.server.answering import Reply, answer
from radixserve.server.call import limits_of
from radixserve.server.context import ServerContext
from radixserve.server.fields import read_parsed
from radixserve.server.generation import ChoiceDelta, Generation, joined
from radixserve.server.json_arrays import EncodedArray
from radixserve.server.logprobs import native_logprob, num_shown
from radixserve.server.native_call import NativeCall, parse_native_call
from radixserve.tokenizer import Tokenizer


def native_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    @router.put("/generate")
    async def generate(http: HttpRequest) -> Response:
        started_at = time.monotonic()
        limits = limits_of(context)
        asked = await read_parsed(http, context.config.max_body_bytes, lambda body: parse_native_call(body, limits))
        call_id = uuid.uuid4().hex

        def make_reply(generation: Generation) -> Reply:
            return NativeReply(asked, generation, context.tokenizer, call_id)

        return await answer(http, context, asked.call, call_id, started_at, make_reply)

    return router


class NativeReply:
    """Each event holds the whole of its choice so far."""

    def __init__(self, asked: NativeCall, generation: Generation, tokenizer: Tokenizer, call_id: str) -> None:
        self._asked = asked
        self._generation = generation
        self._tokenizer = tokenizer
        self._call_id = call_id
        self._so_far: dict[int, ChoiceDelta] = {}
        self._inputs: dict[int, _Logprobs] = {}  # by prompt: all its choices show the same
        self._outputs: dict[int, _Logprobs] = {}  # by choice

    def num_shown_tokens(self, delta: ChoiceDelta) -> int:
        return num_shown(delta.prompt_logprobs) + num_shown(delta.logprobs)

    def whole(self, choices: list[ChoiceDelta]) -> Any:
        bodies = [self._body(choice, choice) for choice in choices]
        return bodies if self._asked.is_batch else bodies[0]

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        index = delta.choice_index
        text = dataclasses.replace(delta, logprobs=(), prompt_logprobs=())  # log-probabilities are kept encoded
        earlier = self._so_far.get(index)
        so_far = self._so_far[index] = text if earlier is None else joined([earlier, text])
        body = self._body(so_far, delta)
        return [{"index": index, **body} if self._asked.is_batch else body]

    def last_chunks(self) -> list[Any]:
        return []

    def _body(self, choice: ChoiceDelta, news: ChoiceDelta) -> dict[str, Any]:
        """choice: all so far; of its log-probabilities those of `news` are not encoded yet."""
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
            meta |= self._logprobs(news)
        return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}

    def _id(self, index: int) -> str:
        if self._asked.call.ids:
            return self._asked.call.ids[index]
        return f"{self._call_id}-{index}" if self._asked.is_batch else self._call_id

    def _logprobs(self, news: ChoiceDelta) -> dict[str, Any]:
        index = news.choice_index
        prompt_index = self._asked.call.prompt_index(index)
        if prompt_index not in self._inputs:
            self._inputs[prompt_index] = _Logprobs(self._input_entries(news), self._tokenizer, self._asked.with_text)
        if index not in self._outputs:
            self._outputs[index] = _Logprobs((), self._tokenizer, self._asked.with_text)
        inputs, outputs = self._inputs[prompt_index], self._outputs[index]
        outputs.extend(news.logprobs)
        meta = {"input_token_logprobs": inputs.tokens.whole(), "output_token_logprobs": outputs.tokens.whole()}
        if self._asked.num_top(index):
            meta |= {"input_top_logprobs": inputs.top.whole(), "output_top_logprobs": outputs.top.whole()}
        return meta

    def _input_entries(self, first: ChoiceDelta) -> list[TokenLogprob | int]:
        start = self._asked.prompt_start(first.choice_index)
        if start is None:
            return []
        # nothing precedes the first token of a prompt: its entry is an id without a number
        return [*self._generation.prompt_ids(first.choice_index)[: 1 if start == 0 else 0], *first.prompt_logprobs]


class _Logprobs:
    """[logprob, id, text] of tokens, and of the likeliest ones in their places; encoded as they come."""

    def __init__(self, entries: Sequence[TokenLogprob | int], tokenizer: Tokenizer, with_text: bool) -> None:
        self._tokenizer = tokenizer
        self._with_text = with_text
        self.tokens = EncodedArray()
        self.top = EncodedArray()
        self.extend(entries)

    def extend(self, entries: Sequence[TokenLogprob | int]) -> None:
        self.tokens.extend(self._entry(entry) for entry in entries)
        self.top.extend(self._top(entry) for entry in entries)

    def _entry(self, entry: TokenLogprob | int) -> list[Any]:
        token_id, logprob = (entry, None) if isinstance(entry, int) else (entry.token_id, entry.logprob)
        return native_logprob(self._tokenizer, token_id, logprob, self._with_text)

    def _top(self, entry: TokenLogprob | int) -> list[list[Any]] | None:
        if isinstance(entry, int):
            return None
        return [native_logprob(self._tokenizer, token_id, logprob, self._with_text) for token_id, logprob in entry.top]


def _finish_reason(choice: ChoiceDelta) -> dict[str, Any] | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case reason:
            return {"type": reason, "matched": choice.matched}
