"""Replies while the client may leave at any moment: server-sent events, and waiting with an eye on the connection."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE_EVENT = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody left to answer."""


def event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves first, `work` is cancelled and ClientGoneError raised. The body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()  # the body itself may be refused when its end comes
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. Sending waits for a slow client, who so slows nobody but itself.

    `close` is called at the end in every case; a client that leaves is noticed at once, not with the next event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
