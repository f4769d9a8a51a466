"""Bodies that are late, and answers that are early: a body that does not come is a 408, and who is answered before its end sees the answer.

A connection that closes with bytes unread is reset, and a client that is still sending then never sees why it was refused. So the answer
goes out at once, what still comes is read and dropped for a while, and the connection closes only then.
"""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.errors import BodyTimeoutError

LINGER_S = 0.5


class BodyMiddleware:
    """Inside of what counts answers, outside of all that may answer or raise."""

    def __init__(self, app: ASGIApp, body_timeout_s: float) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._body_timeout_s)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request that has a body."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_timeout_s: float) -> None:
        self._receive = receive
        self._send = send
        self._body_timeout_s = body_timeout_s
        self._is_awaiting_leave = Headers(scope=scope).get("expect", "").lower() == "100-continue"
        self._is_body_done = False

    async def receive(self) -> Message:
        """Raises BodyTimeoutError when not a byte of the body came for too long."""
        self._is_awaiting_leave = False
        if self._is_body_done:
            return await self._receive()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await self._receive_part()
        except TimeoutError:
            raise BodyTimeoutError(f"no byte of the body came for {self._body_timeout_s:g} s") from None

    async def send(self, message: Message) -> None:
        if not self._is_body_done and message["type"] == "http.response.start":
            if not self._is_awaiting_leave:  # asking for what is here would say 100 Continue
                await self._drop_rest(0.0)
            if not self._is_body_done:
                MutableHeaders(scope=message)["connection"] = "close"
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if self._is_body_done or not is_last:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._drop_rest(LINGER_S)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive_part(self) -> Message:
        message = await self._receive()
        self._is_body_done = not message.get("more_body")  # a client that left sends no more either
        return message

    async def _drop_rest(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not self._is_body_done:
                    await self._receive_part()
        except TimeoutError:
            pass


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
