"""A server that answers at once, for measuring who asks: `python -m tests.support.null_server NUM_TOKENS` prints its address.

Each answer is the same stream of NUM_TOKENS chunks with usage, written in one piece; the connection stays open only as long as asked.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _stream(num_tokens: int) -> bytes:
    events = []
    for count in range(1, num_tokens + 1):
        usage = {"prompt_tokens": 64, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "text": " word", "finish_reason": "length" if count == num_tokens else None}
        events.append(b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n")
    events.append(b"data: [DONE]\n\n")
    chunks = b"".join(f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in events) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


class _Connection(asyncio.Protocol):
    """Waits for the whole body, as Content-Length says, then answers and closes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._received = b""
        self._expected = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._expected < 0 and (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, _, length = head.partition(b"content-length:")
            self._expected = end + 4 + int(length.split(b"\r\n")[0] or 0)
        if 0 <= self._expected <= len(self._received):
            is_metrics = self._received.startswith(b"GET ")
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" if is_metrics else self._answer)
            self._transport.close()


async def _main(num_tokens: int) -> None:
    answer = _stream(num_tokens)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answer), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@asynccontextmanager
async def null_server(num_tokens: int) -> AsyncIterator[str]:
    """The address of one in a process of its own, so that its work is not counted as the generator's."""
    command = [sys.executable, "-m", "tests.support.null_server", str(num_tokens)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
