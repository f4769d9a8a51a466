"""Bodies that are too long, late or broken, and answers that come before their end: on a real socket, where a reset would show."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from radixserve.config import ServerConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.live_server import Live, live_app

LIMIT = 2**20
BODY_TIMEOUT_S = 0.3
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    async with live_app(tokenizer, ServerConfig(max_body_bytes=LIMIT, body_timeout_s=BODY_TIMEOUT_S, api_key="key")) as live:
        yield live


def head(path: bytes, headers: bytes, method: bytes = b"POST", key: bytes = b"key") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n" % (method, path, key, headers)


async def ask(live: Live, *parts: bytes) -> tuple[bytes, dict[str, str | None]]:
    """Status line with headers, and the error, once all parts are sent, each after the one before has left this side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        received = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    assert received.count(b"HTTP/1.1 ") == 1, received
    top, _, body = received.partition(b"\r\n\r\n")
    return top, json.loads(body)["error"]


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
async def test_a_declared_length_is_refused_before_a_byte_of_the_body(live: Live, expects: bytes) -> None:
    started = time.monotonic()
    top, error = await ask(live, head(b"/v1/completions", expects + b"Content-Length: %d\r\n" % (LIMIT + 1)))
    assert top.startswith(b"HTTP/1.1 413 "), "and no 100 Continue before it"
    assert b"\r\nconnection: close" in top
    assert error["code"] == "request_too_large"
    assert time.monotonic() - started < 5


async def test_a_body_that_is_wanted_is_asked_for(live: Live) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3}'
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(head(b"/v1/completions", b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(body)))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "key", "num_bytes", "status"),
    [
        (b"POST", b"/v1/completions", b"key", 8 * LIMIT, 413),
        (b"PUT", b"/v1/completions", b"key", LIMIT, 405),
        (b"POST", b"/no/such/route", b"key", LIMIT, 404),
        (b"POST", b"/v1/completions", b"wrong", LIMIT, 401),
    ],
)
@pytest.mark.parametrize("asks_to_close", [b"", b"Connection: close\r\n"])
async def test_who_is_still_sending_sees_the_answer(
    live: Live, method: bytes, path: bytes, key: bytes, num_bytes: int, status: int, asks_to_close: bytes
) -> None:
    headers = asks_to_close + b"Content-Length: %d\r\n" % num_bytes
    top, _ = await ask(live, head(path, headers, method, key), *[bytes(LIMIT // 8)] * (8 * num_bytes // LIMIT))
    assert top.startswith(b"HTTP/1.1 %d " % status)


async def test_a_small_body_that_is_here_costs_no_connection(live: Live) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    for _ in range(2):
        writer.write(head(b"/no/such/route", b"Content-Length: 2\r\n") + b"{}")
        top = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert top.startswith(b"HTTP/1.1 404 ") and b"connection: close" not in top
        length = next(int(line.split(b":")[1]) for line in top.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
    writer.close()


@pytest.mark.parametrize("begun", [b"", b'{"prompt": '])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/flush_cache?timeout=9"])
async def test_a_body_that_does_not_come_is_a_408(live: Live, begun: bytes, path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(timeout_s: float) -> bool:
        await asyncio.sleep(60)
        return False

    monkeypatch.setattr(live.engine, "flush_cache", never)
    top, error = await ask(live, head(path, b"Content-Length: 100\r\n") + begun)
    assert top.startswith(b"HTTP/1.1 408 ")
    assert (error["code"], error["message"]) == ("body_timeout", "no byte of the body came for 0.3 s")
    assert not live.app.state.context.gate.num_inside


async def test_a_slow_body_is_waited_for_as_long_as_it_moves(live: Live) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3}'
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(head(b"/v1/completions", b"Content-Length: %d\r\n" % len(body)))
    started = time.monotonic()
    for start in range(0, len(body), 2):
        writer.write(body[start : start + 2])
        await asyncio.sleep(BODY_TIMEOUT_S / 10)
    assert time.monotonic() - started > BODY_TIMEOUT_S
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("broken", [b"zz\r\n{}\r\n", b"2\r\n{}xx", b"-1\r\n{}\r\n", b"ffffffffffffffffff\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_broken_chunked_framing_is_a_400(live: Live, broken: bytes, at_once: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    top = head(b"/v1/completions", CHUNKED)
    if at_once:
        writer.write(top + broken)
    else:
        writer.write(top)
        await asyncio.sleep(0.05)
        writer.write(broken)
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert received.startswith(b"HTTP/1.1 400 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_nonsense_behind_a_whole_request_takes_nothing_from_it(live: Live) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3}'
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(head(b"/v1/completions", b"Content-Length: %d\r\n" % len(body)) + body + b"\x00\x01nonsense\r\n\r\n")
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert received.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.1 ") == 1
