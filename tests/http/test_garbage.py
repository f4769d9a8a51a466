"""Calls of the server go without cycles: full collections may be seldom (engine/garbage.py)."""

import asyncio
import gc

import orjson
import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

from radixserve.server.stream import BODY_WRITER
from tests.http.conftest import Served

NUM_CALLS = 20


class Client:
    """No library's, which would leave cycles of its own."""

    def __init__(self, body: bytes) -> None:
        self.received = b""
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    def try_write(self, piece: bytes) -> bool:
        self.received += piece
        return True

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()  # it stays to the end
        return self._messages.pop()

    async def send(self, message: Message) -> None:
        self.received += message.get("body", b"")


async def call(app: FastAPI, body: bytes) -> bytes:
    client = Client(body)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "server": ("server", 80),
        "client": ("client", 1),
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "extensions": {BODY_WRITER: {"writer": client}},
    }
    await app(scope, client.receive, client.send)
    return client.received


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": "c"}])
async def test_a_call_leaves_nothing_to_the_collector(served: Served, is_stream: bool, fields: dict[str, object]) -> None:
    body = orjson.dumps({"prompt": "abcd", "max_tokens": 5, "stream": is_stream, **fields})
    await call(served.app, body)
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_CALLS):
            assert (b'"stop"' if fields.get("stop") else b'"length"') in await call(served.app, body)
        num_found = gc.collect()
    finally:
        gc.enable()
    assert num_found < NUM_CALLS, f"{num_found} objects of {NUM_CALLS} calls could only be found by the collector"
