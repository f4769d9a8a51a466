"""The streaming client of bench/, against small servers that speak HTTP/1.1 over a real socket."""

import asyncio
from typing import Any

import pytest

from bench.client import RequestFailedError, chat_body, completion_body, fetch, stream_completion
from tests.support.bench_servers import CHUNKED, chunk, delta, event, serving, usage

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
    assert done.gaps == pytest.approx([done.gaps[0]] * 4, rel=0.001)
    assert sum(done.gaps) > 0.06
    assert done.num_output_tokens == 5


async def test_blank_output_is_counted_by_the_server() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(event(" " * 100)) + chunk(event(usage=usage(1, 100, 0))) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with serving(handler) as url:
        assert (await stream_completion(url, completion_body("m", "x", 100))).num_output_tokens == 100


USAGE = usage(9, 3, 2)
ROLE = delta({"role": "assistant", "content": ""})
LAST = delta({}, finish="length")
CHATS = {
    "nobody counts until the end": [ROLE, delta({"content": "a"}), delta({"content": ""}), delta({"content": " bä"}), LAST],
    "each chunk is counted": [
        delta({"role": "assistant", "content": ""}, usage=usage(9, 0, 2)),
        delta({"content": "a"}, usage=usage(9, 1, 2)),
        delta({"content": " bä"}, usage=usage(9, 3, 2)),
        delta({}, finish="length", usage=USAGE),
    ],
    "the role comes with the first token": [
        delta({"role": "assistant", "content": "a"}),
        delta({"content": " b"}),
        delta({"content": "ä"}),
    ],
    "thoughts are tokens": [
        ROLE,
        delta({"reasoning_content": "hm"}),
        delta({"content": "a"}),
        delta({"content": " bä"}),
        LAST,
    ],
}


@pytest.mark.parametrize("kind", CHATS)
async def test_a_chat(kind: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = []

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append((path, body))
        writer.write(CHUNKED)
        for one in (*CHATS[kind], event(usage=USAGE), b"data: [DONE]\n\n"):
            writer.write(chunk(one))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")

    messages = [{"role": "user", "content": "x"}]
    async with serving(handler) as url:
        done = await stream_completion(url, chat_body("m", messages, 3, {"seed": None}), "/v1/chat/completions")
    [(path, body)] = bodies
    assert (path, body["messages"], body["max_tokens"], body["stream"]) == ("/v1/chat/completions", messages, 3, True)
    assert body["stream_options"]["include_usage"] and "seed" not in body and "prompt" not in body
    assert done.text == "a bä"
    assert (done.num_prompt_tokens, done.num_output_tokens, done.num_cached_tokens) == (9, 3, 2)
    assert len(done.token_times) == 3
    # the chunk with only a role is no token
    assert kind == "the role comes with the first token" or done.ttft > 0.01


FAILURES = [
    (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nno prompt", "HTTP 400: no prompt"),
    (CHUNKED + chunk(b'data: {"error": {"message": "engine dead"}}\n\n') + b"0\r\n\r\n", "engine dead"),
    (CHUNKED + chunk(event("a")) + b"0\r\n\r\n", "ended without"),
    (CHUNKED + b"ff\r\ndata: {", "connection ended inside"),
    (CHUNKED + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "expected text in the stream, got none"),
    (b"SSH-2.0\r\n", "expected an HTTP status line"),
    (CHUNKED + b"many\r\n", "expected a length before the answer's bytes"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: some\r\n\r\n", "expected a length before the answer's bytes"),
    (CHUNKED + chunk(b"data: {\n\n"), "expected a completion's JSON in an event"),
    (CHUNKED + chunk(b"data: [1]\n\n"), "expected a completion's JSON in an event"),
    (CHUNKED + chunk(b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}}\n\n'), "expected a completion's JSON in an event"),
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
