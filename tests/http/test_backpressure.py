"""A client that does not read, on a real socket: memory stays bounded, others go on, and its requests end with it."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import ServerConfig
from radixserve.server.generation import ChoiceDelta
from radixserve.server.openai_reply import CompletionReply
from radixserve.server.protocol import HttpProtocol
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.live_server import Live, live_app
from tests.support.waiting import until

STEP_S = 0.002
NUM_CHOICES = 16
BODY = {"prompt": "0123456789", "max_tokens": 900, "n": NUM_CHOICES, "stream": True}  # about 2 MB of events


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    async with live_app(tokenizer, ServerConfig(), lambda config: EchoEngine(config, STEP_S), send_buffer_bytes=4096) as live:
        yield live


def ask_without_reading(live: Live, body: dict[str, Any] = BODY) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", live.port))
    data = json.dumps(body).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    client.setblocking(False)
    return client


def buffered_bytes(live: Live) -> int:
    """What the server holds for all connections outside the kernel."""
    return sum(connection.transport.get_write_buffer_size() for connection in live.server.server_state.connections)


async def test_a_client_that_does_not_read_holds_little_and_slows_nobody(live: Live) -> None:
    with ask_without_reading(live):
        await until(lambda: len(live.echo.running_ids) == NUM_CHOICES)
        gaps, lines = [], []
        async with httpx.AsyncClient(base_url=live.url, timeout=30) as http:
            body = {"prompt": "abc", "max_tokens": 500, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                last_at = time.monotonic()
                async for line in reply.aiter_lines():
                    lines.append(line)
                    gaps.append(time.monotonic() - last_at)
                    last_at = time.monotonic()
                    assert buffered_bytes(live) < 200_000
        assert "data: [DONE]" in lines
        assert max(gaps) < 1.0
        # the engine is done with the other one long before its client has read anything: nothing holds it up
        await until(lambda: not live.echo.running_ids, 30)
        assert buffered_bytes(live) < 200_000
        await until(lambda: not live.engine._streams)
        assert live.server.server_state.connections  # its client has read nothing yet, and can
    await until(lambda: not live.server.server_state.connections)
    await until(lambda: live.app.state.context.gate.num_inside == 0)


async def test_a_client_that_leaves_without_reading_aborts(live: Live) -> None:
    client = ask_without_reading(live)
    await until(lambda: len(live.echo.running_ids) == NUM_CHOICES and buffered_bytes(live) > 0)
    client.close()
    await until(lambda: not live.echo.running_ids, 1.0)
    assert len(live.echo.abort_steps) == NUM_CHOICES


async def test_a_client_that_reads_late_gets_every_token_once(live: Live) -> None:
    with ask_without_reading(live) as client:
        await until(lambda: len(live.echo.running_ids) == NUM_CHOICES)
        await until(lambda: not live.echo.running_ids, 30)
        loop = asyncio.get_running_loop()
        received = b""
        while part := await loop.sock_recv(client, 65536):
            received += part
    texts = [""] * NUM_CHOICES
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == ["0123456789" * 90] * NUM_CHOICES
    assert b"data: [DONE]" in received


async def test_a_client_that_keeps_up_is_written_to_where_the_news_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what fails there fails that one stream, not the engine's supervisor in whose call it happens."""
    pieces: list[bytes] = []
    write, chunks = HttpProtocol.try_write, CompletionReply.chunks

    def noting(protocol: HttpProtocol, piece: bytes) -> bool:
        pieces.append(piece)
        return write(protocol, piece)

    def failing(reply: CompletionReply, delta: ChoiceDelta) -> list[dict[str, Any]]:
        if delta.text == "!":
            raise RuntimeError("a fault in the middle of a stream")
        return chunks(reply, delta)

    monkeypatch.setattr(HttpProtocol, "try_write", noting)
    monkeypatch.setattr(CompletionReply, "chunks", failing)
    async with httpx.AsyncClient(base_url=live.url, timeout=30) as http:
        good = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 300, "stream": True}))
        bad = await http.post("/v1/completions", json={"prompt": "0123456789!", "max_tokens": 300, "stream": True})
        events = (await good).text.split("\n\n")
    assert bad.text.split("\n\n")[-2:] == ["data: [DONE]", ""]
    assert json.loads(bad.text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == "abc" * 100
    assert len(pieces) > 100
    assert live.engine.num_restarts == 0
    assert not live.echo.running_ids


async def test_much_news_for_a_client_that_reads_late_is_made_piece_by_piece(live: Live) -> None:
    """Many choices whose news are small one by one."""
    body = {"prompt": ["a" * 50] * 100, "echo": True, "logprobs": 20, "max_tokens": 40, "stream": True}
    loop, most = asyncio.get_running_loop(), 0
    with ask_without_reading(live, body) as client:
        await until(lambda: len(live.echo.running_ids) == 100)
        await until(lambda: not live.echo.running_ids, 30)
        received = 0
        while part := await loop.sock_recv(client, 65536):
            received += len(part)
            most = max(most, buffered_bytes(live))
    assert received > 1_000_000
    assert most < 300_000


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("stop_len", [50, 150])  # with 20 likeliest tokens each, the latter is made in a thread
async def test_a_stop_string_at_the_end_of_much_news_is_followed_by_all_that_belongs_there(live: Live, path: str, stop_len: int) -> None:
    stop = ["a" * stop_len]
    if path == "/generate":
        params = {"stop": stop, "max_new_tokens": 300}
        body = {"text": "b" + "a" * 200, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 20, "stream": True}
    else:
        options = {"include_usage": True}
        body = {"prompt": "b" + "a" * 200, "stop": stop, "max_tokens": 300, "logprobs": 20, "stream": True, "stream_options": options}
    async with httpx.AsyncClient(base_url=live.url, timeout=30) as http:
        events = (await http.post(path, json=body)).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert events.count("data: [DONE]") == 1
    last = json.loads(events[-3].removeprefix("data: "))
    if path == "/generate":
        assert last["meta_info"]["finish_reason"]["type"] == "stop"
        assert last["text"] == "b"
        assert len(last["meta_info"]["output_token_logprobs"]) == last["meta_info"]["completion_tokens"] == 1 + stop_len
    else:
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 1 + stop_len
