"""From a running generation to an HTTP reply, whole or as a stream. What the bodies look like is the Reply's business."""

import logging
from collections.abc import AsyncGenerator
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
        deltas = generation.deltas()
        first = await until_gone(http.receive, _next(deltas))
        return EventStream(_events(reply, first, deltas), generation.close, headers)
    except BaseException:
        generation.close()
        raise


async def _next(deltas: AsyncGenerator[ChoiceDelta]) -> ChoiceDelta:
    return await anext(deltas)


async def _whole(generation: Generation, reply: Reply, num_choices: int) -> Any:
    by_choice: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            by_choice[delta.choice_index].append(delta)
    return reply.whole([joined(choice) for choice in by_choice])


async def _events(reply: Reply, first: ChoiceDelta, deltas: AsyncGenerator[ChoiceDelta]) -> AsyncGenerator[bytes]:
    """Ends with [DONE] in every case; a failure is an error event before it."""
    try:
        async with aclosing(deltas):
            yield _encoded(reply.chunks(first))
            async for delta in deltas:
                yield _encoded(reply.chunks(delta))
        for chunk in reply.last_chunks():
            yield event(chunk)
    except Exception as error:
        description = describe(error)
        if description.http_status == 500:
            logger.exception("a request failed in its stream")
        yield event(error_body(description))
    yield DONE_EVENT


def _encoded(chunks: list[Any]) -> bytes:
    return b"".join(event(chunk) for chunk in chunks)
