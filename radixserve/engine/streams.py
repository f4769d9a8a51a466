"""News of requests on their way to whoever asked: one stream per request, groups of streams for calls with several choices.

A consumer that reads slowly costs no more than its token ids, and the log-probabilities that it asked for: outputs that were not
taken yet are merged into one. Who has ended lets go of its listener, which holds what reads it: a cycle would keep both until a full
collection, and those are seldom (engine/garbage.py).
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from radixserve.core import FinishReason, Request, RequestError, RequestOutput, TokenLogprob
from radixserve.errors import RadixServeError


class RequestStream:
    """Async iterator of RequestOutput whose last one is final. Close it to abort; closing after the end does nothing."""

    def __init__(self, request: Request, abort: Callable[[str], None], finish: Callable[[str, int], None]) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_ids)
        self.has_news = False  # anything was ever pushed
        self._abort = abort
        self._finish = finish
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[TokenLogprob] = []
        self._pending_prompt_logprobs: list[TokenLogprob] = []
        self._pending: RequestOutput | None = None
        self._last = RequestOutput(request.request_id, (), len(request.prompt_ids), 0, 0)
        self._event = asyncio.Event()
        self._listener: Callable[[], None] = self._event.set
        self.is_ended = False  # nothing more will be pushed
        self._is_exhausted = False  # nothing more will be taken

    def push(self, output: RequestOutput) -> None:
        """News from the engine; ignored once the stream has ended."""
        if self.is_ended:
            return
        was_empty = self._pending is None
        self.has_news = True
        self._pending_ids.extend(output.token_ids)
        self._pending_logprobs.extend(output.logprobs)
        self._pending_prompt_logprobs.extend(output.prompt_logprobs)
        self._pending = self._last = output
        self.is_ended = output.is_final
        if was_empty:
            self._listener()

    def cut(self, error: RadixServeError) -> None:
        """End with a final output that carries `error`: the engine died, or the server stops."""
        nothing_new = dataclasses.replace(self._last, token_ids=(), logprobs=(), prompt_logprobs=())
        self.push(dataclasses.replace(nothing_new, finish_reason=FinishReason.ERROR, error=RequestError.of(error)))

    def take(self) -> RequestOutput | None:
        """All news since the last take as one output; None when there is none."""
        output, self._pending = self._pending, None
        if output is None:
            return None
        is_merged = len(self._pending_ids) != len(output.token_ids)
        if is_merged or len(self._pending_prompt_logprobs) != len(output.prompt_logprobs):
            output = dataclasses.replace(
                output,
                token_ids=tuple(self._pending_ids),
                logprobs=tuple(self._pending_logprobs),
                prompt_logprobs=tuple(self._pending_prompt_logprobs),
            )
        self._pending_ids.clear()
        self._pending_logprobs.clear()
        self._pending_prompt_logprobs.clear()
        self._is_exhausted = output.is_final
        if output.is_final:
            self._listener = _tell_nobody
        return output

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when news arrive at an empty stream (and now, when some are there). Replaces iteration."""
        self._listener = listener
        if self._pending is not None:
            listener()

    def finish(self, num_output_tokens: int) -> None:
        """The consumer found a stop string: the request ends with its first num_output_tokens tokens, and so does this stream."""
        if not self.is_ended:
            self._finish(self.request_id, num_output_tokens)
        self._end()

    def close(self) -> None:
        if not self.is_ended:
            self._abort(self.request_id)
        listener = self._end()
        listener()  # whoever waits learns of the end

    def _end(self) -> Callable[[], None]:
        """Returns who listened until now."""
        self.is_ended = self._is_exhausted = True
        self._pending = None
        listener, self._listener = self._listener, _tell_nobody
        return listener

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._is_exhausted:
            output = self.take()
            if output is not None:
                return output
            self._event.clear()
            await self._event.wait()
        raise StopAsyncIteration


class StreamGroup:
    """Several streams as one: their news as (index, RequestOutput), in order of arrival, until all of them have ended."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = tuple(streams)
        self._num_open = len(self._streams)
        # At most one entry per stream with news, and one for its close: a stream reports only when it was empty before.
        self._ready: deque[int] = deque()
        self._event = asyncio.Event()
        self._listener: Callable[[], None] = self._event.set
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._note, index))

    @property
    def is_ended(self) -> bool:
        """Nothing more will be taken."""
        return self._num_open == 0

    def take(self) -> tuple[int, RequestOutput] | None:
        """All news of the stream whose news came first; None when there is none now."""
        while self._ready and self._num_open:
            index = self._ready.popleft()
            output = self._streams[index].take()
            if output is not None:
                self._count_ended(output.is_final)
                return index, output
        return None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever news arrive at an empty stream, in the middle of their arrival. Replaces wait()."""
        self._listener = listener

    async def wait(self) -> None:
        """Returns when there may be news, or an end."""
        if not self._ready and self._num_open:
            self._event.clear()
            await self._event.wait()

    def finish(self, index: int, num_output_tokens: int) -> None:
        """A stop string was found in this stream, in an output that was not final."""
        self._count_ended(1)
        self._streams[index].finish(num_output_tokens)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._count_ended(self._num_open)

    def _count_ended(self, count: int) -> None:
        self._num_open -= count
        if not self._num_open:
            self._listener = _tell_nobody  # who took the last knows

    def _note(self, index: int) -> None:
        self._ready.append(index)
        self._listener()


def _tell_nobody() -> None:
    pass
