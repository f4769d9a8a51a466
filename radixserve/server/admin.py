"""Routes for operators: /health, /flush_cache, /metrics."""

import math

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import RequestError
from radixserve.errors import EngineDeadError, EngineStalledError, InvalidRequestError, ShuttingDownError
from radixserve.server.context import ServerContext
from radixserve.server.replies import error_reply, json_reply
from radixserve.server.stream import until_gone

DEFAULT_FLUSH_TIMEOUT_S = 1.0  # long enough for a request that was aborted a moment ago to be gone
MAX_FLUSH_TIMEOUT_S = 600.0
_METRICS_TIMEOUT_S = 1.0  # in a longer step the last snapshot is served


def admin_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """Answers from what is known here; never waits for the engine."""
        if not context.gate.is_open:
            raise ShuttingDownError("the server is shutting down")
        if not context.engine.is_alive:
            raise EngineDeadError("the engine is not running")
        if context.engine.stalled_s >= context.config.stall_timeout_s:
            raise EngineStalledError(f"the engine has work and has moved nothing for {context.engine.stalled_s:.0f} s")
        return json_reply({"status": "ok"})

    @router.post("/reset_prefix_cache")
    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache(http: HttpRequest) -> Response:
        if not context.gate.is_open:  # the door asks this of a POST
            raise ShuttingDownError("the server is shutting down")
        timeout_s = _timeout_of(http)
        if await until_gone(http.receive, context.engine.flush_cache(timeout_s)):
            return json_reply({"status": "flushed"})
        message = f"the cache was not flushed: requests were still running or waiting after {timeout_s:g} s"
        return error_reply(RequestError(message, 400, "invalid_request_error", "engine_busy"))

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics(http: HttpRequest) -> Response:
        if http.method == "HEAD":
            return Response(media_type=CONTENT_TYPE_PLAIN_0_0_4)
        await context.engine.stats(_METRICS_TIMEOUT_S)
        return Response(generate_latest(context.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _timeout_of(http: HttpRequest) -> float:
    text = http.query_params.get("timeout")
    if text is None:
        return DEFAULT_FLUSH_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise InvalidRequestError(f"timeout: expected seconds in [0, {MAX_FLUSH_TIMEOUT_S:g}], got {text[:60]}", param="timeout")
    return timeout_s
