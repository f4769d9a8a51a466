"""One API call on its way: its requests in the engine, one detokenizer per choice, the deltas for the reply, and the usage."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.core import FinishReason, IntArray, Request, RequestError, RequestOutput, TokenLogprob
from radixserve.engine.client import AsyncEngine
from radixserve.engine.streams import StreamGroup
from radixserve.engine.text import OutputText, TextDelta
from radixserve.errors import RequestAbortedError
from radixserve.server.latency import LatencyMetrics
from radixserve.server.replies import RequestFailedError
from radixserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice; exactly one delta of each choice has a finish_reason, and it is the last.

    Tokens whose text is held back come with the delta that shows it. Joined, the deltas of a choice hold one token id, and one
    log-probability where they were asked for, for each token that the usage counts: EOS and the tokens of a stop string included.
    """

    choice_index: int
    text: str
    finish_reason: str | None = None
    matched: str | int | None = None  # what the reason "stop" was: a stop string, or the id of EOS or a stop token
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all, in the first delta of a prompt's first choice, before the others'
    is_first: bool = False


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Successive deltas of one choice as one."""
    last = deltas[-1]
    return ChoiceDelta(
        last.choice_index,
        "".join(delta.text for delta in deltas),
        last.finish_reason,
        last.matched,
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[0].prompt_logprobs,
        deltas[0].is_first,
    )


class TokenCounts(NamedTuple):
    prompt: int
    cached: int  # of the prompt
    completion: int


@dataclass(slots=True)
class _Choice:
    text: OutputText
    num_prompt_tokens: int
    num_tokens: int = 0
    num_cached_tokens: int | None = None  # None until the first news
    num_pinned_tokens: int | None = None  # None where no pin was asked for
    last_news_at: float | None = None
    is_first: bool = True
    # not sent yet:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, output: RequestOutput, news: TextDelta) -> None:
        num_new = news.num_tokens - self.num_tokens
        self.num_tokens = news.num_tokens
        self.token_ids += output.token_ids[:num_new]
        self.logprobs += output.logprobs[:num_new]
        self.prompt_logprobs += output.prompt_logprobs

    def take(self, index: int, news: TextDelta) -> ChoiceDelta:
        reason = None if news.finish_reason is None else news.finish_reason.value
        tokens = self.token_ids, self.logprobs, self.prompt_logprobs
        delta = ChoiceDelta(index, news.text, reason, news.matched, *tokens, self.is_first)
        self.is_first = False
        self.token_ids = self.logprobs = self.prompt_logprobs = ()
        return delta


class Generation:
    """Requests are ordered by choice index: prompt index * n + k. Close it to abort what still runs."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        n: int,
        latency: LatencyMetrics,
        started_at: float,
        skip_special_tokens: Sequence[bool],
    ) -> None:
        """skip_special_tokens: one per request. Raises EngineDeadError, QueueFullError."""
        self.started_at = started_at
        self._n = n
        self._latency = latency
        self._prompt_ids = [request.prompt_ids for request in requests]
        texts = [OutputText(tokenizer, request, skips) for request, skips in zip(requests, skip_special_tokens)]
        self._choices = [_Choice(text, len(prompt_ids)) for text, prompt_ids in zip(texts, self._prompt_ids)]
        self._is_scored = [request.sampling.prompt_logprobs is not None for request in requests]
        self._held: list[tuple[int, RequestOutput]] = []  # of choices whose prompt's log-probabilities have not come yet
        self._group = _submit_all(engine, requests)

    @property
    def is_ended(self) -> bool:
        """Every choice has given its last delta, or all is closed."""
        return self._group.is_ended and not self._held

    def take(self) -> ChoiceDelta | None:
        """The next delta of what is here; None when there is none now. Raises RequestFailedError when any choice fails: close it then."""
        while (news := self._next_news()) is not None:
            index, output = news
            text = self._advance(index, output)
            if text.text or text.finish_reason:
                return self._choices[index].take(index, text)
        return None

    def _next_news(self) -> tuple[int, RequestOutput] | None:
        for position, (index, _) in enumerate(self._held):
            if not self._waits_for_scores(index):
                return self._held.pop(position)
        while (news := self._group.take()) is not None:
            if not self._waits_for_scores(news[0]):
                return news
            self._held.append(news)
        return None

    def _waits_for_scores(self, index: int) -> bool:
        """A prompt is scored once, with its first choice, whose first delta says it for all of them."""
        first = index - index % self._n
        return index != first and self._is_scored[first] and self._choices[first].is_first

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, where news arrive; from now on nobody waits in deltas()."""
        self._group.listen(listener)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """All deltas as they come. Raises as take() does; the others are aborted then."""
        try:
            while (delta := self.take()) is not None or not self.is_ended:
                if delta is None:
                    await self._group.wait()
                else:
                    yield delta
        finally:
            self.close()

    async def first(self) -> ChoiceDelta:
        """Raises as take() does."""
        assert not self.is_ended, "nothing will come any more"
        while (delta := self.take()) is None:
            await self._group.wait()
        return delta

    def close(self) -> None:
        self._held.clear()
        self._group.close()

    def prompt_ids(self, index: int) -> IntArray:
        return self._prompt_ids[index]

    def counts(self, index: int) -> TokenCounts:
        """Of one choice so far. Cached tokens are the least of the choices of its prompt: a later one re-uses what the first computed."""
        choices = self._choices[index - index % self._n :][: self._n]
        num_cached = min((choice.num_cached_tokens for choice in choices if choice.num_cached_tokens is not None), default=0)
        return TokenCounts(self._choices[index].num_prompt_tokens, num_cached, self._choices[index].num_tokens)

    def num_pinned(self, index: int) -> int | None:
        """Tokens of the choice's prompt that are pinned; None where none was asked for, or it is not done yet."""
        return self._choices[index].num_pinned_tokens

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once."""
        counts = [self.counts(index) for index in range(0, len(self._choices), self._n)]
        num_prompt_tokens = sum(count.prompt for count in counts)
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        details = {"cached_tokens": sum(count.cached for count in counts)}
        pinned = [self.num_pinned(index) for index in range(0, len(self._choices), self._n)]
        if any(count is not None for count in pinned):
            details["pinned_tokens"] = sum(count or 0 for count in pinned)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": details,
        }

    def _advance(self, index: int, output: RequestOutput) -> TextDelta:
        choice = self._choices[index]
        self._observe(choice, output)
        _raise_for_failure(output)
        news = choice.text.push(output)
        choice.add(output, news)
        if news.must_finish:
            self._group.finish(index, news.num_tokens)
        if news.finish_reason is not None:
            self._latency.observe_end(time.monotonic() - self.started_at)
            self._latency.observe_lens(choice.num_prompt_tokens, choice.num_tokens)
        return news

    def _observe(self, choice: _Choice, output: RequestOutput) -> None:
        if choice.num_cached_tokens is None:
            choice.num_cached_tokens = output.num_cached_tokens
        choice.num_pinned_tokens = output.num_pinned_tokens
        if not output.token_ids:
            return
        now = time.monotonic()
        if choice.last_news_at is None:
            self._latency.observe_first_token(now - self.started_at, output.queue_time_s)
        else:
            self._latency.observe_tokens(now - choice.last_news_at, len(output.token_ids))
        choice.last_news_at = now


def _submit_all(engine: AsyncEngine, requests: Sequence[Request]) -> StreamGroup:
    """All of them or none."""
    engine.room.require(len(requests))
    streams = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return StreamGroup(streams)


def _raise_for_failure(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or RequestError("the request failed", 500, "server_error", "internal_error"))
    if output.finish_reason is FinishReason.ABORT:
        raise RequestAbortedError("the request was aborted before it was complete")
