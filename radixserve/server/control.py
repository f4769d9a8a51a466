"""Routes that look after the service: /ready, /health_generate, POST /abort_request."""

import asyncio
import time
import uuid
from array import array

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import FinishReason, Namespace, Request, SamplingParams
from radixserve.engine.streams import RequestStream
from radixserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    ShuttingDownError,
    UnavailableError,
)
from radixserve.server.context import ServerContext
from radixserve.server.fields import Fields, read_object
from radixserve.server.replies import json_reply
from radixserve.server.sampling_fields import MAX_PRIORITY, check_rid
from radixserve.server.stream import until_gone

PROBE_TIMEOUT_S = 20.0
_LOOK_INTERVAL_S = 0.02
_PROBE_PREFIX = "HEALTH_CHECK"


def control_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        _require_ready(context)
        return json_reply({"status": "ready"})

    @router.get("/health_generate")
    async def health_generate(http: HttpRequest) -> Response:
        """One token through the whole engine, before everything that waits; on a full engine, that it moves what it has."""
        _require_ready(context)
        await until_gone(http.receive, _probe(context))
        return json_reply({"status": "ok"})

    @router.post("/abort_request")
    async def abort_request(http: HttpRequest) -> Response:
        """An unknown rid is no error: the request may have ended a moment ago."""
        fields = Fields(await read_object(http, context.config.max_body_bytes))
        rid, abort_all = fields.raw("rid"), fields.boolean("abort_all")
        if not rid and not abort_all:
            raise InvalidRequestError("rid: expected a request id, or abort_all: true", param="rid")
        prefix = "" if abort_all else check_rid(fields, "rid", rid)
        num_aborted = context.engine.abort_matching(prefix)
        return json_reply({"num_aborted": num_aborted}, headers=context.ignored_header(tuple(fields.unread())))

    return router


def _require_ready(context: ServerContext) -> None:
    if not context.gate.is_open:
        raise ShuttingDownError("the server is shutting down")
    if not context.engine.is_alive:
        raise EngineDeadError("the engine is not running")


async def _probe(context: ServerContext) -> None:
    """Raises EngineDeadError where no engine runs, UnavailableError for one that dies meanwhile or moves nothing within PROBE_TIMEOUT_S."""
    engine = context.engine
    stream = engine.submit(_probe_request(context))
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if await _is_served(stream):
                return
            while not engine.has_moved_since(started_at):  # no room, as it says: then whoever is in must get on
                await asyncio.sleep(_LOOK_INTERVAL_S)
                _require_ready(context)
    except TimeoutError:
        if not engine.has_moved_since(started_at):
            raise UnavailableError(f"the engine moved nothing within {PROBE_TIMEOUT_S:g} s") from None
    finally:
        stream.close()


async def _is_served(stream: RequestStream) -> bool:
    """False when there was no room even to wait in, or not in time."""
    async for output in stream:
        if output.error is not None and output.error.code in (QueueFullError.code, QueueTimeoutError.code, RequestTimeoutError.code):
            return False
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise UnavailableError("the engine did not finish a request of one token")
    return True


def _probe_request(context: ServerContext) -> Request:
    """In a namespace of its own: a probe must neither find nor leave anything that a client could meet."""
    return Request(
        f"{_PROBE_PREFIX}-{uuid.uuid4().hex}",
        array("i", [context.tokenizer.bos_token_id or 0]),
        SamplingParams(max_tokens=1, temperature=0.0),
        namespace=Namespace(extra_key=_PROBE_PREFIX),
        priority=MAX_PRIORITY,
    )
