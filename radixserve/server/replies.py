"""The one shape of every error, and JSON replies."""

from typing import Any

import orjson
from starlette.responses import Response

from radixserve.core import RequestError
from radixserve.errors import RadixServeError


class RequestFailedError(Exception):
    """A request that was accepted and then ended in an error, on its way to the reply."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}}


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return bytes_reply(orjson.dumps(body), headers, status)


def bytes_reply(body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """Of JSON that is encoded already."""
    return Response(body, status, headers, media_type="application/json")


# Seconds after which trying again makes sense. A request that ran out of its own time is not among them: it would take as long again.
_RETRY_AFTER_S = {"queue_full": 1, "queue_timeout": 2, "engine_dead": 2, "engine_stalled": 10, "shutting_down": 5, "unavailable": 2}


def error_reply(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """With what SDKs and gateways obey: whether and when to try again, and how to log in."""
    return json_reply(error_body(error), error.http_status, {**_advice(error), **(headers or {})})


def _advice(error: RequestError) -> dict[str, str]:
    if error.http_status == 401:
        return {"www-authenticate": "Bearer"}
    if error.http_status in (429, 503) and error.code in _RETRY_AFTER_S:
        return {"retry-after": str(_RETRY_AFTER_S[error.code]), "x-should-retry": "true"}
    return {"x-should-retry": "false"} if error.http_status >= 429 else {}


def describe(error: Exception) -> RequestError:
    """What a client may know of an exception: everything of ours, nothing of an unexpected one."""
    if isinstance(error, RequestFailedError):
        return error.error
    if isinstance(error, RadixServeError):
        return RequestError.of(error)
    return RequestError("internal error; the server's log says more", 500, "server_error", "internal_error")
