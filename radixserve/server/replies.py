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
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def error_reply(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    return json_reply(error_body(error), error.http_status, headers)


def describe(error: Exception) -> RequestError:
    """What a client may know of an exception: everything of ours, nothing of an unexpected one."""
    if isinstance(error, RequestFailedError):
        return error.error
    if isinstance(error, RadixServeError):
        return RequestError.of(error)
    return RequestError("internal error; the server's log says more", 500, "server_error", "internal_error")
