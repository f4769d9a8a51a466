"""Around every route: request ids, the drain gate, and one error shape whatever fails. Plain ASGI, so that streams pass untouched."""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.errors import ShuttingDownError
from radixserve.server.gate import Gate
from radixserve.server.replies import describe, error_reply
from radixserve.server.stream import ClientGoneError

logger = logging.getLogger("radixserve.server")

_MAX_REQUEST_ID_CHARS = 128


class EdgeMiddleware:
    """x-request-id is honoured and always returned; POST is refused while draining; an exception becomes an error body."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._pass_gate(scope, receive, send_with_id)
        except (ClientGoneError, ClientDisconnect):
            pass
        except Exception as error:
            if is_started:
                raise
            reply = describe(error)
            if reply.http_status == 500:
                logger.exception("request %s failed", request_id)
            await error_reply(reply)(scope, receive, send_with_id)

    async def _pass_gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if not self._gate.is_open:
            raise ShuttingDownError("the server is shutting down and takes no new requests")
        self._gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()


def _request_id(given: str) -> str:
    is_usable = 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if is_usable else f"req-{uuid.uuid4().hex}"
