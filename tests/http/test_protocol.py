"""Bytes on a real socket that no ordinary client sends: pipelining, offers to upgrade, heads without end, clients that leave meanwhile."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from radixserve.config import ServerConfig
from radixserve.server.protocol import MAX_HEAD_BYTES
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.live_server import Live, live_app
from tests.support.waiting import until

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    async with live_app(tokenizer, ServerConfig(), lambda config: EchoEngine(config, 0.005)) as live:
        yield live


@asynccontextmanager
async def connection(live: Live) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchange(live: Live, sent: bytes) -> bytes:
    """All that the server says until it closes."""
    async with connection(live) as (reader, writer):
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 5)


def post(max_tokens: int, headers: bytes = b"", **fields: object) -> bytes:
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n" % (headers, len(body)) + body


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_client_that_pipelined_and_left_is_noticed(
    live: Live, caplog: pytest.LogCaptureFixture, is_stream: bool, at_once: bool
) -> None:
    request = post(900, stream=is_stream)
    async with connection(live) as (_, writer):
        writer.write(request + GET if at_once else request)
        await until(lambda: live.echo.running_ids)
        if not at_once:
            writer.write(GET)
            await asyncio.sleep(0.05)
    await until(lambda: not live.echo.running_ids, 1.0)
    assert len(live.echo.abort_steps) == 1
    await until(lambda: not live.server.server_state.tasks)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_what_was_pipelined_is_not_answered_and_the_client_is_told_to_come_again(live: Live) -> None:
    reply = await exchange(live, post(6) + GET)
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "abcabc"


async def test_requests_one_after_the_other_share_a_connection(live: Live) -> None:
    async with connection(live) as (reader, writer):
        for _ in range(3):
            writer.write(post(3))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("num_parts", [1, 2, 400])
async def test_an_offer_to_upgrade_is_ignored(live: Live, caplog: pytest.LogCaptureFixture, offer: bytes, num_parts: int) -> None:
    request = post(3, offer)
    size = -(-len(request) // num_parts)
    async with connection(live) as (reader, writer):
        for _ in range(2):  # the connection lives on
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                await asyncio.sleep(0)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "abc"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_offer_to_upgrade_with_a_chunked_body_and_without_one(live: Live) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % H2C
    async with connection(live) as (reader, writer):
        writer.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
    async with connection(live) as (reader, writer):
        writer.write(GET.replace(b"\r\n\r\n", b"\r\n" + WEBSOCKET + b"\r\n"))
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        GET.replace(b"\r\n\r\n", b"\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"),
        GET.replace(b"\r\n\r\n", b"\r\nx: " + b"a" * MAX_HEAD_BYTES),  # and no end
        GET.replace(b"\r\n\r\n", b"\r\nx: a" * (MAX_HEAD_BYTES // 4)),
        b"GET /" + b"a" * MAX_HEAD_BYTES,
    ],
)
async def test_a_head_has_a_limit(live: Live, head: bytes) -> None:
    async with connection(live) as (reader, writer):
        writer.write(head)
        reply_head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert reply_head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(await reader.read(4096))["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_what_is_no_request_gets_an_error_of_the_usual_shape(live: Live, sent: bytes) -> None:
    reply = await exchange(live, sent)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
