"""From a running generation to an HTTP reply, whole or as a stream. What the bodies look like is the Reply's business."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.server.call import Call, start_generation
from radixserve.server.context import ServerContext
from radixserve.server.generation import ChoiceDelta, Generation, joined
from radixserve.server.off_loop import off_loop_from
from radixserve.server.replies import bytes_reply, describe, error_body
from radixserve.server.stream import DONE_EVENT, EventStream, event, until_gone

logger = logging.getLogger("radixserve.server")

GENERATION_KEY = "radixserve.generation"  # in the ASGI scope, for the log of requests
# From here on building a body is worth a thread. About 2 ms.
LARGE_BODY_TOKENS = 2048
# What a stream makes at a time for a client that was slow, or a message with much news; then the socket is asked again.
PIECE_BYTES = 65536


class Reply(Protocol):
    """The bodies of one call in one protocol. Called from one thread at a time, not always the loop's."""

    def num_shown_tokens(self, delta: ChoiceDelta) -> int:
        """About how many tokens the body of this delta shows one by one: what building it costs."""

    def whole(self, choices: list[ChoiceDelta]) -> Any:
        """The body of a reply without a stream; choices in order, each complete."""

    def chunks(self, delta: ChoiceDelta) -> list[Any]:
        """The events that tell of one delta."""

    def last_chunks(self) -> list[Any]:
        """The events after the last delta, before [DONE]."""


async def answer(
    http: HttpRequest, context: ServerContext, call: Call, call_id: str, started_at: float, make_reply: Callable[[Generation], Reply]
) -> Response:
    """Start the generation and answer by it.

    Raises what start_generation raises, and what the engine says before its first news: then a refusal has a status and is not inside
    a stream. Whatever fails from the start on, nothing runs any more then.
    """
    generation = await start_generation(context, call, call_id, started_at)
    try:
        http.scope[GENERATION_KEY] = generation
        reply = make_reply(generation)
        headers = context.ignored_header(call.ignored)
        if not call.is_stream:
            return bytes_reply(await until_gone(http.receive, _whole(generation, reply, call.num_choices)), headers)
        first = await until_gone(http.receive, generation.first())
        return EventStream(ReplyEvents(generation, reply, first), headers)
    except BaseException:
        generation.close()
        raise


async def _whole(generation: Generation, reply: Reply, num_choices: int) -> bytes:
    by_choice: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            by_choice[delta.choice_index].append(delta)
    choices = [joined(choice) for choice in by_choice]
    num_tokens = sum(map(reply.num_shown_tokens, choices))
    return await off_loop_from(LARGE_BODY_TOKENS, num_tokens, lambda: orjson.dumps(reply.whole(choices)))


class ReplyEvents:
    """The bytes of one streamed call. They end with [DONE] in every case; a failure is an error event before it."""

    def __init__(self, generation: Generation, reply: Reply, first: ChoiceDelta) -> None:
        self._generation = generation
        self._reply = reply
        self._first: ChoiceDelta | None = first
        self._large: ChoiceDelta | None = None  # the next one, and a thread's work
        self.has_more = False
        self.is_ended = False

    @property
    def has_large(self) -> bool:
        return self._large is not None

    def take(self) -> bytes:
        if self.is_ended or self.has_large:
            return b""
        events: list[bytes] = []
        try:
            self._add_news(events)
            if self.has_large or self.has_more or not self._generation.is_ended:
                return b"".join(events)
            events += map(event, self._reply.last_chunks())
        except Exception as error:
            return self._failed(events, error)
        return self._ended(events)

    async def take_large(self) -> bytes:
        delta, self._large = self._large, None
        assert delta is not None
        try:
            return await asyncio.to_thread(self._encoded, delta)
        except Exception as error:
            return self._failed([], error)

    def listen(self, listener: Callable[[], None]) -> None:
        self._generation.listen(listener)

    def close(self) -> None:
        self._generation.close()

    def _add_news(self, events: list[bytes]) -> None:
        num_bytes = num_tokens = 0
        self.has_more = False
        delta, self._first = self._first or self._generation.take(), None
        while delta is not None:
            num_delta_tokens = self._reply.num_shown_tokens(delta)
            if num_delta_tokens >= LARGE_BODY_TOKENS:
                self._large = delta
                return
            events.append(self._encoded(delta))
            num_bytes += len(events[-1])
            num_tokens += num_delta_tokens
            if num_bytes >= PIECE_BYTES or num_tokens >= LARGE_BODY_TOKENS:
                self.has_more = True
                return
            delta = self._generation.take()

    def _encoded(self, delta: ChoiceDelta) -> bytes:
        return b"".join(map(event, self._reply.chunks(delta)))

    def _failed(self, events: list[bytes], error: Exception) -> bytes:
        description = describe(error)
        if description.http_status == 500:
            logger.error("a request failed in its stream", exc_info=error)
        return self._ended([*events, event(error_body(description))])

    def _ended(self, events: list[bytes]) -> bytes:
        self.is_ended = True
        self.close()
        return b"".join([*events, DONE_EVENT])
