"""Small servers of the completions protocol over real sockets, for the tests of the load generator."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

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


def delta(content: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    """One event of a chat."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": content, "finish_reason": finish}], "usage": usage}).encode() + b"\n\n"


def event(
    text: str | None = None, finish: str | None = None, usage: dict[str, Any] | None = None, token_ids: list[int] | None = None
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    choices = [] if text is None else [choice]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}


class WholeWords:
    """Stands in for bench.words.Words: word i is the text " w<i>"."""

    def __init__(self) -> None:
        self.ids = list(range(100, 2100))

    def text(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]


TEMPLATE_BEGIN = {"user": 9_001, "assistant": 9_002}
TEMPLATE_END = 9_003


def chat_prompt(messages: list[dict[str, str]], encode: Callable[[str], list[int]]) -> list[int]:
    """A template's work: a token before and after each message, and one more that asks for the answer."""
    turns = [[TEMPLATE_BEGIN[one["role"]], *encode(one["content"]), TEMPLATE_END] for one in messages]
    return [token for turn in turns for token in turn] + [TEMPLATE_BEGIN["assistant"]]


class RadixServer:
    """Answers completions and chats with made-up words, and tells as cached what an unlimited store of prefixes at page size 1 holds."""

    def __init__(self, gives_token_ids: bool = True, encode: Callable[[str], list[int]] | None = None) -> None:
        self.gives_token_ids = gives_token_ids
        self._encode = encode or WholeWords().encode
        self.known: set[int] = set()
        self.num_running = self.max_running = self.num_flushes = self.num_answers = 0
        self.cached_tokens = 0
        self.prompts: list[list[int]] = []

    async def handle(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/flush_cache":
            self.num_flushes += 1
            self.known.clear()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        if path == "/metrics":
            text = f'# TYPE cached counter\nsglang:cached_tokens_total{{model_name="m"}} {self.cached_tokens}.0\n'.encode()
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        is_chat = path.endswith("/chat/completions")
        asked = chat_prompt(body["messages"], self._encode) if is_chat else body["prompt"]
        prompt = asked if isinstance(asked, list) else self._encode(asked)
        self.prompts.append(prompt)
        self.num_answers += 1
        answer = [1_000_000 + 1000 * self.num_answers + i for i in range(body["max_tokens"])]
        links, link = [], 0
        for token in prompt + answer[:-1]:
            link = hash((link, token))
            links.append(link)
        cached = next((i for i, link in enumerate(links[: len(prompt)]) if link not in self.known), len(prompt) - 1)
        self.known.update(links)
        self.cached_tokens += cached
        writer.write(CHUNKED + (chunk(delta({"role": "assistant", "content": ""})) if is_chat else b""))
        for token in answer:
            gives_ids = self.gives_token_ids and body.get("return_token_ids")
            said = delta({"content": f" w{token}"}) if is_chat else event(f" w{token}", token_ids=[token] if gives_ids else None)
            writer.write(chunk(said))
        await asyncio.sleep(0.002)
        writer.write(chunk(event(usage=usage(len(prompt), len(answer), cached)) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self.num_running -= 1
