"""One streamed completion over raw asyncio: an HTTP library costs too much CPU beside a server on the same two cores.

Knows HTTP/1.1 (chunked or not) and server-sent events; knows nothing of loads.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class RequestFailedError(Exception):
    """The server refused, sent an error event, or ended the stream early."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answered request. Seconds; stamps are those of time.perf_counter()."""

    sent_at: float
    done_at: float
    ttft: float  # from this request's own sending to its first text
    gaps: tuple[float, ...]  # between tokens; between chunks where the server does not say how many tokens a chunk holds
    tpot: float | None  # (last - first) / (tokens - 1)
    text: str
    num_output_tokens: int  # the server's count, never that of re-tokenized text
    num_prompt_tokens: int | None  # the server's count
    num_cached_tokens: int | None  # None: the server does not tell


@dataclass(slots=True)
class _Stream:
    """What has come so far."""

    stamps: list[float] = field(default_factory=list)  # one per chunk with text
    token_counts: list[int] = field(default_factory=list)  # tokens so far at each stamp, where chunks carry usage
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def add(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            raise RequestFailedError(str(event["error"]))
        self.usage = event.get("usage") or self.usage
        choice = (event.get("choices") or [{}])[0]
        text = choice.get("text")
        # a last chunk with only a finish reason is no token; an empty text without one is a token held back
        if not choice or (choice.get("finish_reason") and not text):
            return
        self.stamps.append(now)
        self.text.append(text or "")
        if event.get("usage"):
            self.token_counts.append(event["usage"]["completion_tokens"])

    def gaps(self) -> tuple[float, ...]:
        pairs = list(zip(self.stamps, self.stamps[1:]))
        if len(self.token_counts) != len(self.stamps):
            return tuple(later - earlier for earlier, later in pairs)
        # a chunk of k tokens after a pause is k tokens, each a k-th of the pause apart
        sizes = [later - earlier for earlier, later in zip(self.token_counts, self.token_counts[1:])]
        return tuple((later - earlier) / size for (earlier, later), size in zip(pairs, sizes) for _ in range(size))


def completion_body(model: str, prompt: list[int] | str, max_tokens: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The request's JSON. `extra` is merged over it; a field that is None there is dropped."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "seed": 0,
    }
    return {name: value for name, value in {**body, **(extra or {})}.items() if value is not None}


async def stream_completion(url: str, body: dict[str, Any], path: str = "/v1/completions", timeout_s: float = 600.0) -> Completion:
    """Send `body` to url + path and read the stream to its end.

    Raises RequestFailedError on a status other than 200, an error event or an early end; OSError; TimeoutError.
    """
    async with asyncio.timeout(timeout_s):
        sent_at = time.perf_counter()
        reader, writer = await _send(url, "POST", path, json.dumps(body).encode())
        try:
            stream = await _read_stream(reader)
        finally:
            writer.close()
    done_at = time.perf_counter()
    if not stream.stamps:
        raise RequestFailedError("expected text in the stream, got none")
    num_output = stream.usage.get("completion_tokens") or len(stream.stamps)
    return Completion(
        sent_at=sent_at,
        done_at=done_at,
        ttft=stream.stamps[0] - sent_at,
        gaps=stream.gaps(),
        tpot=(stream.stamps[-1] - stream.stamps[0]) / (num_output - 1) if num_output > 1 else None,
        text="".join(stream.text),
        num_output_tokens=num_output,
        num_prompt_tokens=stream.usage.get("prompt_tokens"),
        num_cached_tokens=(stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


async def _read_stream(reader: asyncio.StreamReader) -> _Stream:
    status, headers = await _read_head(reader)
    chunks = _body(reader, headers)
    if status != 200:
        raise RequestFailedError(f"HTTP {status}: {b''.join([chunk async for chunk in chunks])[:600].decode(errors='replace')}")
    stream = _Stream()
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
        stream.add(json.loads(data), now)
    if not stream.is_done:
        raise RequestFailedError("the stream ended without [DONE]")
    return stream


async def fetch(url: str, method: str, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Status and body of one plain request without a body of its own. Raises OSError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await _send(url, method, path, b"")
        try:
            status, headers = await _read_head(reader)
            return status, b"".join([chunk async for chunk in _body(reader, headers)])
        finally:
            writer.close()


async def _send(url: str, method: str, path: str, payload: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"url: expected http://HOST:PORT, got {url!r}")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 22)
    head = (
        f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readline()
    fields = status_line.split(None, 2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        raise RequestFailedError(f"expected an HTTP status line, got {status_line[:100]!r}")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(fields[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        async for chunk in _raw_body(reader, headers):
            yield chunk
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RequestFailedError(f"the connection ended inside the answer: {error}") from error


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
