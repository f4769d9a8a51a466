"""One API call on its way: its requests in the engine, one detokenizer per choice, the deltas for the reply, and the usage."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.core import FinishReason, Request, RequestError, RequestOutput
from radixserve.engine.client import AsyncEngine
from radixserve.engine.streams import StreamGroup
from radixserve.engine.text import OutputText
from radixserve.errors import EngineDeadError, RequestAbortedError
from radixserve.server.latency import LatencyMetrics
from radixserve.server.replies import RequestFailedError
from radixserve.tokenizer.tokenizer import Tokenizer


class ChoiceDelta(NamedTuple):
    """New text of one choice; exactly one delta of each choice has a finish_reason, and it is the last."""

    choice_index: int
    text: str
    finish_reason: str | None


@dataclass(slots=True)
class _Choice:
    text: OutputText
    num_prompt_tokens: int
    num_tokens: int = 0
    num_cached_tokens: int | None = None  # None until the first news
    last_news_at: float | None = None


class Generation:
    """Requests are ordered by choice index: prompt index * n + k. Close it to abort what still runs."""

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, requests: Sequence[Request], n: int, latency: LatencyMetrics, started_at: float
    ) -> None:
        self._n = n
        self._latency = latency
        self._started_at = started_at
        self._choices = [_Choice(OutputText(tokenizer, request), len(request.prompt_ids)) for request in requests]
        self._group = _submit_all(engine, requests)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """Raises RequestFailedError when any choice fails; the others are aborted then."""
        try:
            async for index, output in self._group:
                delta = self._advance(index, output)
                if delta.text or delta.finish_reason:
                    yield delta
        finally:
            self.close()

    def close(self) -> None:
        self._group.close()

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once. Its cached tokens are the least of its choices: a later choice re-uses what the first computed."""
        by_prompt = [self._choices[start : start + self._n] for start in range(0, len(self._choices), self._n)]
        num_prompt_tokens = sum(choices[0].num_prompt_tokens for choices in by_prompt)
        num_cached = sum(min((c.num_cached_tokens for c in choices if c.num_cached_tokens is not None), default=0) for choices in by_prompt)
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _advance(self, index: int, output: RequestOutput) -> ChoiceDelta:
        choice = self._choices[index]
        self._observe(choice, output)
        _raise_for_failure(output)
        news = choice.text.push(output)
        choice.num_tokens = news.num_tokens
        if news.must_finish:
            self._group.finish(index, news.num_tokens)
        if news.finish_reason is None:
            return ChoiceDelta(index, news.text, None)
        self._latency.observe_end(time.monotonic() - self._started_at)
        self._latency.observe_lens(choice.num_prompt_tokens, choice.num_tokens)
        return ChoiceDelta(index, news.text, news.finish_reason.value)

    def _observe(self, choice: _Choice, output: RequestOutput) -> None:
        if choice.num_cached_tokens is None:
            choice.num_cached_tokens = output.num_cached_tokens
        if not output.token_ids:
            return
        now = time.monotonic()
        if choice.last_news_at is None:
            self._latency.observe_first_token(now - self._started_at, output.queue_time_s)
        else:
            self._latency.observe_tokens(now - choice.last_news_at, len(output.token_ids))
        choice.last_news_at = now


def _submit_all(engine: AsyncEngine, requests: Sequence[Request]) -> StreamGroup:
    streams = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except EngineDeadError:
        for stream in streams:
            stream.close()
        raise
    return StreamGroup(streams)


def _raise_for_failure(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or RequestError("the request failed", 500, "server_error", "internal_error"))
    if output.finish_reason is FinishReason.ABORT:
        raise RequestAbortedError("the request was aborted before it was complete")
