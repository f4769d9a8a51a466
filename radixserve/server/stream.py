"""Replies while the client may leave at any moment: server-sent events, and waiting with an eye on the connection."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE_EVENT = b"data: [DONE]\n\n"
BODY_WRITER = "radixserve.body_writer"  # in the extensions of the ASGI scope


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


class Events(Protocol):
    """A source of events. take() and the listener are called in the middle of the news' arrival, so neither may raise or wait."""

    @property
    def is_ended(self) -> bool:
        """The last event was taken."""

    @property
    def has_large(self) -> bool:
        """What comes next takes long to build: take_large() does it in a thread, and take() gives nothing before."""

    @property
    def has_more(self) -> bool:
        """The last take() stopped where its piece was large enough: there may be more."""

    def take(self) -> bytes:
        """The events of the news so far, of bounded size, up to a large one; b"" when there are none."""

    async def take_large(self) -> bytes:
        """The events of the large news, which there are. Does not raise."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when news come where none were."""

    def close(self) -> None: ...


class BodyWriter(Protocol):
    """What a server may offer in the scope's extensions: a way to the socket without a task and an await for each event."""

    def try_write(self, piece: bytes) -> bool:
        """Write a piece of a body that has begun. False, and nothing was done, when its client is slow or gone: use send() then."""


class EventStream(Response):
    """Sends events as they come. Sending waits for a slow client, who so slows nobody but itself.

    While the client keeps up, events are written where their news arrive; the task sends what comes first, last, or behind a full buffer.
    The events are closed at the end in every case; a client that leaves is noticed at once, not with the next event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._writer: BodyWriter | None = None
        self._unsent = b""
        self._is_idle = False  # the task waits for news: everything before is with the transport
        self._wake = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = (scope.get("extensions") or {}).get(BODY_WRITER, {}).get("writer")
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._is_idle = False
            self._events.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._events.listen(self._on_news)
        while True:
            piece, self._unsent = self._unsent + self._events.take(), b""
            if self._events.has_large:
                piece += await self._events.take_large()
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            elif self._events.is_ended:
                break
            else:
                self._is_idle = True
                self._wake.clear()
                await self._wake.wait()
                self._is_idle = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _on_news(self) -> None:
        """May be called again by what it calls: a stop string that is found ends its stream."""
        if not self._is_idle or self._writer is None:
            self._wake.set()
            return  # the task will take it
        self._is_idle = False
        piece = self._events.take()
        is_for_task = self._events.is_ended or self._events.has_large or self._events.has_more
        if is_for_task or (piece and not self._writer.try_write(piece)):
            self._unsent = piece
            self._wake.set()
        else:
            self._is_idle = True
