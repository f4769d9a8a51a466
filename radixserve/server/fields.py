"""Typed reading of JSON bodies: what was expected, what came, and which fields nobody read."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import orjson
from starlette.requests import Request as HttpRequest

from radixserve.errors import InvalidRequestError, RequestTooLargeError, UnsupportedEncodingError
from radixserve.server.json_limits import check_num_values
from radixserve.server.off_loop import off_loop_from

T = TypeVar("T")

LARGE_BODY_BYTES = 16 * 1024  # from here on a body is worth a thread
_MAX_SHOWN_CHARS = 60
# orjson makes floats of integers beyond 64 bits. In bodies up to so many bytes they are read again, so that a message shows what was sent.
_EXACT_BODY_BYTES = 128 * 1024
_MAX_EXACT_DIGITS = 100
_LONG_INTEGER = re.compile(rb"[0-9]{19}")


def show(value: Any) -> str:
    """A value as JSON for a message, cut where it gets long. Costs no more than what is shown, however deep or large the value is."""
    text, is_cut = "", False
    for piece in (value,) if isinstance(value, str) else _json_pieces(value):
        text += piece
        is_cut = len(text) > _MAX_SHOWN_CHARS
        if is_cut:
            break
    text = text[:_MAX_SHOWN_CHARS] + "..." if is_cut else text
    return f'"{text}"' if isinstance(value, str) else text


def _json_pieces(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from _json_pieces(item)
        yield "]" if value else "[]"
    elif isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            yield "," if index else "{"
            yield from _json_pieces(name)
            yield ":"
            yield from _json_pieces(item)
        yield "}" if value else "{}"
    elif type(value) is int:
        yield str(value)  # orjson refuses those beyond 64 bits
    else:
        try:
            yield orjson.dumps(value[: _MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value).decode()
        except TypeError:
            yield type(value).__name__


class Fields:
    """One JSON object. A field that is null counts as absent. Each method raises InvalidRequestError naming the field.

    A boolean is no integer here, though Python says so; an integer is a number.
    """

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def integer(self, name: str, default: int) -> int:
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        value = self.raw(name)
        if value is not None and type(value) is not int:
            is_beyond = type(value) is float and abs(value) >= 2**63
            raise self.wrong(name, "an integer in [-2**63, 2**63 - 1]" if is_beyond else "an integer", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.wrong(name, "a number", value)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def string(self, name: str, default: str = "") -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self.raw(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a string or a list of strings", value)
        return tuple(value)

    def object(self, name: str) -> "Fields":
        value = self.raw(name)
        if value is None:
            return Fields({}, f"{self._path}{name}.")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return Fields(value, f"{self._path}{name}.")

    def objects(self, name: str) -> "list[Fields]":
        """A list of objects, not empty."""
        value = self.raw(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects, not empty", value)
        return [Fields(item, f"{self._path}{name}[{index}].") for index, item in enumerate(value)]

    def all(self) -> dict[str, Any]:
        """A copy of the whole object, for those who take any name."""
        self._read.update(self._body)
        return dict(self._body)

    def path_of(self, name: str) -> str:
        return self._path + name

    def renamed(self, error: InvalidRequestError, name: str) -> InvalidRequestError:
        """An error about one of our own names, said of the field that the caller sent; its message begins with the name."""
        path = self._path + name
        return type(error)(path + error.message.removeprefix(error.param or ""), param=path)

    def unread_names(self) -> list[str]:
        return [name for name in self._body if name not in self._read]

    def unread(self) -> list[str]:
        """The same with their path."""
        return [self._path + name for name in self.unread_names()]

    def wrong(self, name: str, expected: str, value: Any) -> InvalidRequestError:
        return InvalidRequestError(f"{self._path}{name}: expected {expected}, got {show(value)}", param=self._path + name)


async def read_object(request: HttpRequest, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object; see read_parsed."""
    return await read_parsed(request, max_bytes, lambda body: body)


async def read_parsed(request: HttpRequest, max_bytes: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body, a JSON object whatever its content type says (curl -d says form).

    A large body is parsed in a thread, so `parse` may touch nothing that belongs to the loop. (The JSON parser itself lets no other thread
    run: 10 MB of text are 15 ms, and json_limits.py bounds the rest.) Raises InvalidRequestError, RequestTooLargeError,
    UnsupportedEncodingError, and what `parse` raises.
    """
    body = await _read(request, max_bytes)  # also what will be refused: see there
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncodingError(f"content-encoding: expected an uncompressed body, got {show(encoding)}")

    def work() -> T:
        value = _parse(body)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"the body: expected a JSON object, got {show(value)}")
        return parse(value)

    return await off_loop_from(LARGE_BODY_BYTES, len(body), work)


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    """Not a byte of a body that says it is too large; who answers early reads on for a while (early_answer.py)."""
    length = request.headers.get("content-length", "")
    body = bytearray()
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body may have at most {max_bytes} bytes")


def _parse(body: bytes) -> Any:
    check_num_values(body)
    # The collector would walk millions of new containers again and again, all of them alive; they go by their reference counts.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    finally:
        if is_collecting:
            gc.enable()
    return _exact(body, value) if len(body) <= _EXACT_BODY_BYTES and _LONG_INTEGER.search(body) else value


def _exact(body: bytes, value: Any) -> Any:
    """The same with integers of any size as they were sent."""
    try:
        return json.loads(body, parse_int=lambda digits: int(digits) if len(digits) <= _MAX_EXACT_DIGITS else float(digits))
    except RecursionError:  # a deeper body than the standard library reads
        return value
