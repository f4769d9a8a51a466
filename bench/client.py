"""One streamed answer over raw asyncio: an HTTP library costs too much CPU beside a server on the same two cores.

Knows HTTP/1.1 (chunked or not) and server-sent events; what stands in them is bench.protocol's. Knows nothing of loads.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.protocol import AnswerStream, RequestFailedError, chat_body, completion_body

__all__ = ["Completion", "RequestFailedError", "chat_body", "completion_body", "fetch", "stream_completion"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answered request. Seconds; stamps are those of time.perf_counter().

    token_times: one per token; one per chunk where the server does not say how many tokens a chunk holds. A chunk of k tokens after a pause
    is k tokens, each a k-th of the pause apart; the tokens of the first chunk come together.
    """

    sent_at: float
    done_at: float
    token_times: tuple[float, ...]
    text: str
    num_output_tokens: int  # the server's count, never that of re-tokenized text
    num_prompt_tokens: int | None = None  # the server's count
    num_cached_tokens: int | None = None  # None: the server does not tell
    token_ids: tuple[int, ...] | None = None  # where they were asked for and the server gives them

    @property
    def ttft(self) -> float:
        """From this request's own sending to its first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in zip(self.token_times, self.token_times[1:]))

    @property
    def tpot(self) -> float | None:
        """(last token - first) / (tokens - 1); None for one token."""
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


async def stream_completion(
    url: str,
    body: dict[str, Any] | bytes,
    path: str = "/v1/completions",
    timeout_s: float = 600.0,
    headers: Mapping[str, str] | None = None,
) -> Completion:
    """Send `body`, or its JSON, to url + path and read the stream to its end.

    Raises RequestFailedError on a status other than 200, an error event or an early end; OSError; TimeoutError.
    """
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(timeout_s):
        sent_at = time.perf_counter()
        reader, writer = await _send(url, "POST", path, payload, headers)
        try:
            stream = await _read_stream(reader)
        finally:
            writer.close()
    done_at = time.perf_counter()
    if not stream.token_times:
        raise RequestFailedError("expected text in the stream, got none")
    return Completion(
        sent_at=sent_at,
        done_at=done_at,
        token_times=tuple(stream.token_times),
        text="".join(stream.text),
        num_output_tokens=stream.usage.get("completion_tokens") or len(stream.token_times),
        num_prompt_tokens=stream.usage.get("prompt_tokens"),
        num_cached_tokens=(stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        token_ids=None if stream.token_ids is None else tuple(stream.token_ids),
    )


async def _read_stream(reader: asyncio.StreamReader) -> AnswerStream:
    status, response_headers = await _read_head(reader)
    chunks = _body(reader, response_headers)
    if status != 200:
        raise RequestFailedError(f"HTTP {status}: {b''.join([chunk async for chunk in chunks])[:600].decode(errors='replace')}")
    stream = AnswerStream()
    async for line in _lines(chunks):
        now = time.perf_counter()
        if line.startswith(b"error:"):
            raise RequestFailedError(line.decode(errors="replace"))
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            stream.is_done = True
            break
        try:
            stream.add(json.loads(data), now)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailedError(f"expected a completion's JSON in an event, got {data[:100]!r}") from error
    if not stream.is_done:
        raise RequestFailedError("the stream ended without [DONE]")
    return stream


async def fetch(url: str, method: str, path: str, timeout_s: float = 60.0, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of one plain request without a body of its own. Raises RequestFailedError, OSError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await _send(url, method, path, b"", headers)
        try:
            status, response_headers = await _read_head(reader)
            return status, b"".join([chunk async for chunk in _body(reader, response_headers)])
        finally:
            writer.close()


async def _send(
    url: str, method: str, path: str, payload: bytes, headers: Mapping[str, str] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"url: expected http://HOST:PORT, got {url!r}")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 22)
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n{more}Connection: close\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await _read_line(reader)
    fields = status_line.split(None, 2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        raise RequestFailedError(f"expected an HTTP status line, got {status_line[:100]!r}")
    headers: dict[str, str] = {}
    while (line := (await _read_line(reader)).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(fields[1]), headers


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as error:
        raise RequestFailedError(f"expected a line of an HTTP head, got one without an end: {error}") from error


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        async for chunk in _raw_body(reader, headers):
            yield chunk
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RequestFailedError(f"the connection ended inside the answer: {error}") from error
    except ValueError as error:
        raise RequestFailedError(f"expected a length before the answer's bytes: {error}") from error


async def _raw_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while chunk := await reader.read(1 << 16):
            yield chunk


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a body whose chunks may end anywhere; what follows the last line break is a line too."""
    rest = b""
    async for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield line
    if rest:
        yield rest
