"""Around every route: request ids, counting, CORS, API keys, the drain gate, and one error shape whatever fails.

Plain ASGI, so that streams pass untouched. From outside in: EdgeMiddleware, Cors (where asked for), DoorMiddleware, the app.
"""

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.core import RequestError
from radixserve.errors import ShuttingDownError
from radixserve.server.access import AccessGuard
from radixserve.server.answering import GENERATION_KEY
from radixserve.server.gate import Gate
from radixserve.server.generation import Generation
from radixserve.server.http_metrics import HttpMetrics
from radixserve.server.replies import describe, error_reply
from radixserve.server.stream import ClientGoneError

logger = logging.getLogger("radixserve.server")

REQUEST_ID_KEY = "radixserve.request_id"  # in the ASGI scope
_MAX_REQUEST_ID_CHARS = 128
_MAX_LOGGED_PATH_CHARS = 200
_CLIENT_GONE_STATUS = 499  # for the count alone: nobody was there to get an answer


class EdgeMiddleware:
    """x-request-id is honoured and always returned; every answer is counted by route and status, and logged where asked for."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, logs_requests: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        scope[REQUEST_ID_KEY] = request_id
        started_at = time.monotonic()
        status = _CLIENT_GONE_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.count(scope, status)
            if self._logs_requests:
                _log_answer(scope, status, time.monotonic() - started_at)


class Cors(CORSMiddleware):
    """starlette's, with our error shape for a preflight from an origin that is not allowed."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT"),
            allow_headers=("*",),
            expose_headers=("retry-after", "x-radixserve-ignored", "x-request-id"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = bytes(response.body).decode()
        return error_reply(RequestError(message, response.status_code, "invalid_request_error", "cors_refused"), headers)


class DoorMiddleware:
    """The key is asked for before anything else, the body included; draining refuses POST and PUT; an exception becomes an error body."""

    def __init__(self, app: ASGIApp, guard: AccessGuard, gate: Gate) -> None:
        self._app = app
        self._guard = guard
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._guard.check(scope["path"], [value for name, value in scope["headers"] if name == b"authorization"])
            await self._pass_gate(scope, receive, watched_send)
        except (ClientGoneError, ClientDisconnect):
            pass
        except Exception as error:
            if is_started:
                raise
            reply = describe(error)
            if reply.http_status == 500:
                logger.exception("request %s failed", scope[REQUEST_ID_KEY])
            await error_reply(reply)(scope, receive, watched_send)

    async def _pass_gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("POST", "PUT"):  # the others make the engine do nothing that a client waits for
            await self._app(scope, receive, send)
            return
        self._require_open()
        is_inside = False

        async def receive_through_gate() -> Message:
            """Only a request that is here in full is inside: a body that never comes must not hold up the drain."""
            nonlocal is_inside
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body") and not is_inside:
                self._require_open()
                self._gate.enter()
                is_inside = True
            return message

        try:
            await self._app(scope, receive_through_gate, send)
        finally:
            if is_inside:
                self._gate.leave()

    def _require_open(self) -> None:
        if not self._gate.is_open:
            raise ShuttingDownError("the server is shutting down and takes no new requests")


def _log_answer(scope: Scope, status: int, took_s: float) -> None:
    """The path comes from the client: it is cut, and no line break of it reaches the log. The query stays out: it may hold a key."""
    path = "".join(char if char.isprintable() else "?" for char in scope["path"][:_MAX_LOGGED_PATH_CHARS])
    line = f"request {scope[REQUEST_ID_KEY]} {scope['method']} {path} {status} {took_s:.3f} s"
    generation: Generation | None = scope.get(GENERATION_KEY)
    if generation is not None:
        usage = generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        line += f", prompt {usage['prompt_tokens']} tokens, {cached} of them cached, output {usage['completion_tokens']}"
    logger.info("%s", line)


def _request_id(given: str) -> str:
    is_usable = 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if is_usable else f"req-{uuid.uuid4().hex}"
