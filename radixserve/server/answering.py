"""From a running generation to an HTTP reply, whole or as a stream. What the bodies look like is the Reply's business."""

import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.server.call import Call
from radixserve.server.context import ServerContext
from radixserve.server.generation import ChoiceDelta, Generation, joined
from radixserve.server.replies import describe, error_body, json_reply
from radixserve.server.stream import DONE_EVENT, EventStream, event, until_gone

logger = logging.getLogger("radixserve.server")


class Reply(Protocol):
    """The bodies of one call in one protocol."""

    def whole(self, choices: list[ChoiceDelta]) -> Any:
        """The body of a reply without a stream; choices in order, each complete."""

    def chunks(self, delta: ChoiceDelta) -> list[Any]:
        """The events that tell of one delta."""

    def last_chunks(self) -> list[Any]:
        """The events after the last delta, before [DONE]."""


async def answer(http: HttpRequest, context: ServerContext, call: Call, generation: Generation, reply: Reply) -> Response:
    """Raises what the engine says before its first news: then a refusal has a status and is not inside a stream."""
    try:
        headers = context.ignored_header(call.ignored)
        if not call.is_stream:
            return json_reply(await until_gone(http.receive, _whole(generation, reply, call.num_choices)), headers=headers)
        first = await until_gone(http.receive, generation.first())
        return EventStream(ReplyEvents(generation, reply, first), headers)
    except BaseException:
        generation.close()
        raise


async def _whole(generation: Generation, reply: Reply, num_choices: int) -> Any:
    by_choice: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            by_choice[delta.choice_index].append(delta)
    return reply.whole([joined(choice) for choice in by_choice])


class ReplyEvents:
    """The bytes of one streamed call. They end with [DONE] in every case; a failure is an error event before it."""

    def __init__(self, generation: Generation, reply: Reply, first: ChoiceDelta) -> None:
        self._generation = generation
        self._reply = reply
        self._first: ChoiceDelta | None = first
        self.is_ended = False

    def take(self) -> bytes:
        if self.is_ended:
            return b""
        events: list[bytes] = []
        try:
            self._add_news(events)
            if not self._generation.is_ended:
                return b"".join(events)
            events += map(event, self._reply.last_chunks())
        except Exception as error:
            description = describe(error)
            if description.http_status == 500:
                logger.exception("a request failed in its stream")
            events.append(event(error_body(description)))
        self.is_ended = True
        self.close()
        events.append(DONE_EVENT)
        return b"".join(events)

    def listen(self, listener: Callable[[], None]) -> None:
        self._generation.listen(listener)

    def close(self) -> None:
        self._generation.close()

    def _add_news(self, events: list[bytes]) -> None:
        delta, self._first = self._first or self._generation.take(), None
        while delta is not None:
            events += map(event, self._reply.chunks(delta))
            delta = self._generation.take()
