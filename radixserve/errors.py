"""What can go wrong, as one tree. A user error knows its HTTP status and its OpenAI error type and code.

RadixServeError
├── UserError                     the caller's input; never ends the server
│   ├── InvalidRequestError       400 invalid_request_error / invalid_value
│   │   ├── UnsupportedFieldError 400 invalid_request_error / unsupported_parameter
│   │   ├── UnsupportedEncodingError 415 invalid_request_error / unsupported_encoding
│   │   ├── BodyTimeoutError      408 invalid_request_error / body_timeout
│   │   ├── RequestTooLargeError  413 invalid_request_error / request_too_large
│   │   └── ContextLengthError    400 invalid_request_error / context_length_exceeded
│   ├── UnauthorizedError         401 invalid_request_error / invalid_api_key
│   ├── ForbiddenError            403 invalid_request_error / admin_key_required
│   ├── ModelNotFoundError        404 invalid_request_error / model_not_found
│   └── QueueFullError            429 rate_limit_error / queue_full
├── RequestAbortedError           499 server_error / request_aborted
├── UnavailableError              503 server_error / unavailable
│   ├── EngineDeadError           503 server_error / engine_dead
│   ├── EngineStalledError        503 server_error / engine_stalled
│   ├── PoolExhaustedError        503 server_error / pool_exhausted
│   ├── RequestTimeoutError       503 server_error / request_timeout
│   │   └── QueueTimeoutError     503 server_error / queue_timeout
│   └── ShuttingDownError         503 server_error / shutting_down
├── ConfigError                   a flag or a combination of flags
│   └── DeviceMemoryError         memory of the device that could not be had
├── DeviceError                   a device that failed and can compute nothing any more
└── ModelError                    a model that cannot be fetched, read or run
    ├── ModelFetchError
    ├── UnsupportedModelError
    └── WeightError

An AssertionError is a bug of ours and never stands for bad input.
"""

from typing import ClassVar


class RadixServeError(Exception):
    """Base of all errors that radixserve raises on purpose."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UserError(RadixServeError):
    """The caller sent something that cannot be served."""

    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequestError(UserError):
    """A value is out of range or of the wrong type; the message says what was expected and what came."""

    code = "invalid_value"


class UnsupportedFieldError(InvalidRequestError):
    """A field that we know and cannot do yet, set to something that would change the answer."""

    code = "unsupported_parameter"


class UnsupportedEncodingError(InvalidRequestError):
    """The body is compressed."""

    http_status = 415
    code = "unsupported_encoding"


class BodyTimeoutError(InvalidRequestError):
    """The body, or the rest of it, does not come."""

    http_status = 408
    code = "body_timeout"


class RequestTooLargeError(InvalidRequestError):
    """The body has more bytes than the server reads."""

    http_status = 413
    code = "request_too_large"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit the context or the pool."""

    code = "context_length_exceeded"


def context_length_error(num_prompt: int, max_tokens: int, limit: int, is_pool: bool) -> ContextLengthError:
    """The one wording of it: clients look for OpenAI's beginning. is_pool: the KV pool is what limits, and the model could do more.

    Its param is max_tokens where that leaves room for no prompt.
    """
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + max_tokens} tokens "
        f"({num_prompt} in the prompt, {max_tokens} in the completion)."
    )
    if is_pool:
        message += f" The maximum context length here is {limit} tokens since the KV pool holds no more (--max-total-tokens)."
    return ContextLengthError(message, param="max_tokens" if max_tokens >= limit else "prompt")


def shown(value: object) -> str:
    """A Python value for a message, cut where it gets long."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or an object's own failure
        return type(value).__name__
    return text if len(text) <= 60 else text[:60] + "..."


class ModelNotFoundError(UserError):
    http_status = 404
    code = "model_not_found"


class UnauthorizedError(UserError):
    http_status = 401
    code = "invalid_api_key"


class ForbiddenError(UserError):
    """The route needs the admin key."""

    http_status = 403
    code = "admin_key_required"


class QueueFullError(UserError):
    """--max-queued-requests requests wait already. The client may try again."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "queue_full"


class RequestAbortedError(RadixServeError):
    """Ended by an abort before it was complete. 499 is not retried by the SDKs."""

    http_status = 499
    code = "request_aborted"


class UnavailableError(RadixServeError):
    http_status = 503
    code = "unavailable"


class EngineDeadError(UnavailableError):
    """The engine process ended while the request was waiting or running."""

    code = "engine_dead"


class EngineStalledError(UnavailableError):
    """The engine has work and has moved nothing of it for too long."""

    code = "engine_stalled"


class RequestTimeoutError(UnavailableError):
    """The request took longer than the server allows; one that has run would take as long again."""

    code = "request_timeout"


class QueueTimeoutError(RequestTimeoutError):
    """It waited all that time and never ran: it may be sent again."""

    code = "queue_timeout"


class PoolExhaustedError(UnavailableError):
    """No page can be had for a request that had begun, not even by retracting others."""

    code = "pool_exhausted"


class ShuttingDownError(UnavailableError):
    code = "shutting_down"


class ConfigError(RadixServeError):
    """A flag, or a combination of flags, that cannot work."""


class DeviceMemoryError(ConfigError):
    """The device's memory does not suffice; the message says for what, how much is free, and which flags take less."""


class DeviceError(RadixServeError):
    """A device failed, and this process can compute nothing on it any more: another kernel instead would fail too."""


class ModelError(RadixServeError):
    """The model cannot be fetched, read or run."""


class ModelFetchError(ModelError):
    """The default model could not be fetched; the message says what to do without a network."""


class UnsupportedModelError(ModelError):
    """An architecture or an option of it that the Decoder does not compute, by name."""


class WeightError(ModelError):
    """A tensor is missing, superfluous, or has another shape than the config says."""
