"""The streaming client and the closed loop of bench/, against a small server of this file that speaks HTTP/1.1 over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.client import RequestFailedError, completion_body, fetch, stream_completion
from bench.load import Target, flush, run_workload
from bench.workloads import SharedPrefix, make_load, shared_prefix

Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Any]
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The address of a server that gives each request's path and JSON body to `handler`, then closes the connection."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
        body = json.loads(await reader.readexactly(length) or b"{}")
        await handler(head.split(" ")[1], body, writer)
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def event(text: str | None = None, finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}


END = event(usage=usage(5, 3, 2)) + b"data: [DONE]\n\n"
STREAM = event("a") + event(" bä") + event("", finish="length") + END


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_stream_reads_the_same_however_it_is_cut(size: int) -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"".join(chunk(STREAM[i : i + size]) for i in range(0, len(STREAM), size)) + b"0\r\n\r\n")
        await writer.drain()

    async with serving(handler) as url:
        done = await stream_completion(url, completion_body("m", [1, 2, 3, 4, 5], 3))
    assert done.text == "a bä"
    assert (done.num_prompt_tokens, done.num_output_tokens, done.num_cached_tokens) == (5, 3, 2)
    assert len(done.gaps) == 1
    assert 0 <= done.ttft <= done.done_at - done.sent_at


async def test_a_body_without_chunks_and_without_usage() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event("a") + event("b") + event("c", finish="stop") + b"data: [DONE]\n\n")

    async with serving(handler) as url:
        done = await stream_completion(url, completion_body("m", "x", 3))
    assert (done.text, done.num_output_tokens, done.num_prompt_tokens, done.num_cached_tokens) == ("abc", 3, None, None)


async def test_time_to_first_token_is_the_first_text_and_gaps_are_real() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for text in ("a", "b", "c"):
            await asyncio.sleep(0.05)
            writer.write(chunk(event(text)))
            await writer.drain()
        writer.write(chunk(END) + b"0\r\n\r\n")

    async with serving(handler) as url:
        done = await stream_completion(url, completion_body("m", "x", 3))
    assert 0.04 < done.ttft < 1.0
    assert all(0.03 < gap < 1.0 for gap in done.gaps)
    assert done.tpot == pytest.approx(sum(done.gaps) / 2)


async def test_several_tokens_in_one_chunk_are_several_gaps() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(event("a", usage=usage(1, 1, 0))))
        await writer.drain()
        await asyncio.sleep(0.08)
        writer.write(chunk(event("bcde", usage=usage(1, 5, 0))) + chunk(event("", finish="length", usage=usage(1, 5, 0))))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with serving(handler) as url:
        done = await stream_completion(url, completion_body("m", "x", 5))
    assert len(done.gaps) == 4
    assert len(set(done.gaps)) == 1
    assert sum(done.gaps) > 0.06
    assert done.num_output_tokens == 5


async def test_blank_output_is_counted_by_the_server() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(event(" " * 100)) + chunk(event(usage=usage(1, 100, 0))) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with serving(handler) as url:
        assert (await stream_completion(url, completion_body("m", "x", 100))).num_output_tokens == 100


FAILURES = [
    (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nno prompt", "HTTP 400: no prompt"),
    (CHUNKED + chunk(b'data: {"error": {"message": "engine dead"}}\n\n') + b"0\r\n\r\n", "engine dead"),
    (CHUNKED + chunk(event("a")) + b"0\r\n\r\n", "ended without"),
    (CHUNKED + b"ff\r\ndata: {", "connection ended inside"),
    (CHUNKED + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "expected text in the stream, got none"),
    (b"SSH-2.0\r\n", "expected an HTTP status line"),
]


@pytest.mark.parametrize(("answer", "message"), FAILURES)
async def test_a_failed_request_says_why(answer: bytes, message: str) -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with serving(handler) as url:
        with pytest.raises(RequestFailedError, match=message):
            await stream_completion(url, completion_body("m", "x", 3))


async def test_only_plain_http_addresses() -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT, got 'localhost:1'"):
        await fetch("localhost:1", "GET", "/health")


def test_the_body_and_what_is_merged_into_it() -> None:
    body = completion_body("m", [1], 4, {"stream_options": None, "seed": 7})
    assert body == {
        "model": "m",
        "prompt": [1],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "seed": 7,
    }


class WholeWords:
    """Stands in for bench.words.Words: word i is the text " w<i>"."""

    def __init__(self) -> None:
        self.ids = list(range(100, 2100))

    def text(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]


class RadixServer:
    """Answers with made-up words and tells as cached what an unlimited store of prefixes at page size 1 holds."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.num_running = self.max_running = self.num_flushes = self.num_answers = 0

    async def handle(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/flush_cache":
            self.num_flushes += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        prompt = body["prompt"] if isinstance(body["prompt"], list) else WholeWords().encode(body["prompt"])
        self.num_answers += 1
        answer = [1_000_000 + 1000 * self.num_answers + i for i in range(body["max_tokens"])]
        links, link = [], 0
        for token in prompt + answer[:-1]:
            link = hash((link, token))
            links.append(link)
        cached = next((i for i, link in enumerate(links[: len(prompt)]) if link not in self.known), len(prompt) - 1)
        self.known.update(links)
        writer.write(CHUNKED)
        for token in answer:
            writer.write(chunk(event(f" w{token}")))
        await asyncio.sleep(0.002)
        writer.write(chunk(event(usage=usage(len(prompt), len(answer), cached)) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self.num_running -= 1


SHAPE = SharedPrefix(num_groups=3, prompts_per_group=4, system_prompt_len=30, question_len=5, output_len=6, concurrency=3)


@pytest.mark.parametrize("send_text", [False, True])
async def test_a_run_measures_what_the_server_did(send_text: bool) -> None:
    server, words = RadixServer(), WholeWords()
    async with serving(server.handle) as url:
        load = shared_prefix(words.ids, 1, SHAPE)
        result = await run_workload(Target(url, send_text=send_text), words, load, label="fake", seed=1)
        await flush(url)
    assert (result.requests, result.in_tok, result.served_in_tok, result.out_tok) == (12, 12 * 35, 12 * 35, 72)
    assert result.cached_tok == load.ideal_hit_tokens == 3 * 3 * 30
    assert result.hit_rate == result.ideal_hit_rate == pytest.approx(270 / 420)
    assert result.cached_requests == 9
    assert server.max_running == 3
    assert server.num_flushes == 1


async def test_a_conversation_sends_its_history() -> None:
    """Load D: each turn's prompt is all before it, answers included, so the server re-uses all but the last answered token."""
    server, words = RadixServer(), WholeWords()
    async with serving(server.handle) as url:
        load = make_load("D", words.ids, 1)
        result = await run_workload(Target(url), words, load, label="fake", seed=1)
    assert result.requests == 40
    assert result.in_tok == result.served_in_tok == load.prompt_tokens
    assert result.cached_tok == load.ideal_hit_tokens


async def test_a_refused_request_ends_the_run() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model")

    async with serving(handler) as url:
        with pytest.raises(RequestFailedError, match="HTTP 404: no model"):
            await run_workload(Target(url), WholeWords(), shared_prefix(WholeWords().ids, 1, SHAPE), label="fake", seed=1)
        with pytest.raises(RequestFailedError, match="/flush_cache: HTTP 404"):
            await flush(url)
