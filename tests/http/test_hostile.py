"""Bad input costs nothing: every hostile body is answered within a second, and a good stream beside it does not notice."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bench.client import stream_completion
from radixserve.config import ServerConfig
from radixserve.server import logprobs
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.http.hostile import ALL, LARGE_AND_VALID, Hostile
from tests.support.echo_engine import EchoEngine
from tests.support.live_server import live_app, server_process

STEP_S = 0.005
MAX_ANSWER_S = 1.0
MAX_GAP_S = 1.0  # JSON of 10 MB and millions of values takes 0.3 s to read on one free core, and a test machine has other work
MAX_TEXTS_ON_LOOP = 2048  # of the tokens of one large reply
_CHUNK_BYTES = 2**18


async def send(url: str, hostile: Hostile) -> tuple[int, bytes]:
    """Status and body. The server may answer, and close, before it has read everything."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    length = "Transfer-Encoding: chunked" if hostile.is_chunked else f"Content-Length: {len(hostile.body)}"
    head = [f"{hostile.method} {hostile.path} HTTP/1.1", "Host: a", "Connection: close", length, *hostile.headers, "", ""]
    sending = asyncio.create_task(_send_body(writer, "\r\n".join(head).encode("latin-1"), hostile))
    try:
        received = await reader.read()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    head_bytes, _, body = received.partition(b"\r\n\r\n")
    return int(head_bytes.split(b" ")[1]), body


async def _send_body(writer: asyncio.StreamWriter, head: bytes, hostile: Hostile) -> None:
    writer.write(head)
    for start in range(0, len(hostile.body), _CHUNK_BYTES):
        part = hostile.body[start : start + _CHUNK_BYTES]
        writer.write(b"%x\r\n%b\r\n" % (len(part), part) if hostile.is_chunked else part)
        await writer.drain()
    if hostile.is_chunked:
        writer.write(b"0\r\n\r\n")


async def check(url: str, hostile: Hostile) -> str | None:
    """What is wrong with the answer; None if nothing is."""
    for is_last_try in (False, True):  # a machine that stood still for a moment is not the server's fault
        started = time.monotonic()
        try:
            async with asyncio.timeout(10):
                status, body = await send(url, hostile)
        except (OSError, TimeoutError, IndexError, ValueError) as error:
            return f"{hostile.name}: no answer: {error!r}"
        took_s = time.monotonic() - started
        if took_s <= MAX_ANSWER_S or is_last_try:
            break
    if not (400 <= status < 500 or (hostile.may_be_200 and status == 200)):
        return f"{hostile.name}: status {status}: {body[:300]!r}"
    if status != 200 and json.loads(body)["error"].keys() != {"message", "type", "param", "code"}:
        return f"{hostile.name}: {body[:300]!r}"
    if len(body) > 2000:
        return f"{hostile.name}: an answer of {len(body)} bytes"
    return None if took_s <= MAX_ANSWER_S else f"{hostile.name}: answered after {took_s:.1f} s"


@asynccontextmanager
async def good_stream(url: str) -> AsyncIterator[list[float]]:
    """Streams until the block ends, and holds every text to what it must be; the gaps between its events are known then."""
    is_done = False
    gaps: list[float] = []

    async def stream_on() -> None:
        while not is_done:
            completion = await stream_completion(url, {"prompt": "good ", "max_tokens": 200, "stream": True})
            assert completion.text == "good " * 40
            gaps.extend(completion.gaps)

    streaming = asyncio.create_task(stream_on())
    try:
        yield gaps
    finally:
        is_done = True
        await streaming


async def check_server(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).status_code == 200
        metrics = (await http.get("/metrics")).text
    assert 'status="5' not in metrics
    assert 'radixserve_engine_restarts_total{model_name="echo"} 0.0' in metrics


async def test_every_hostile_body_is_answered_and_disturbs_nobody(model_dir: Path) -> None:
    assert len(ALL) >= 60
    assert len({hostile.name for hostile in ALL}) == len(ALL)
    async with server_process(model_dir, STEP_S) as url:
        async with good_stream(url) as gaps:
            faults = [fault for hostile in ALL if (fault := await check(url, hostile)) is not None]
        assert faults == []
        assert max(gaps) < MAX_GAP_S
        await check_server(url)


async def test_large_replies_disturb_nobody(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built off the loop. How long they take there is the machine's; the EchoEngine, which makes all log-probabilities of a prompt
    at once, holds up its own steps: hence no smaller limit for a gap."""
    threads: list[threading.Thread] = []
    token_text = logprobs.token_text

    def noting(*args: object) -> object:
        threads.append(threading.current_thread())
        return token_text(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "token_text", noting)
    async with live_app(tokenizer, ServerConfig(), lambda config: EchoEngine(config, STEP_S)) as live:
        async with good_stream(live.url) as gaps:
            for large in LARGE_AND_VALID:
                threads.clear()
                status, body = await send(live.url, large)
                assert status == 200, body[:300]
                assert len(body) > 150_000, large.name
                assert threads
                if not _is_small_by_event(large):
                    assert sum(thread is threading.main_thread() for thread in threads) < MAX_TEXTS_ON_LOOP, large.name
        assert max(gaps) < MAX_GAP_S
        await check_server(live.url)


def _is_small_by_event(large: Hostile) -> bool:
    """A stream that scores no prompt: large as a whole alone."""
    body = json.loads(large.body)
    return bool(body["stream"]) and body.get("prompt") == "a"
