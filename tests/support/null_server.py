"""A server that answers at once, for measuring who asks: `python -m tests.support.null_server NUM_TOKENS` prints its address.

Each answer is the same stream of NUM_TOKENS chunks with usage, written in one piece: of completions, or of a chat on a chat's route. The
connection stays open only as long as asked.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def completion_stream(num_tokens: int, is_chat: bool = False) -> bytes:
    """A whole answer with its head."""
    events = []
    # a chat begins with a chunk that has no token
    for count in range(0 if is_chat else 1, num_tokens + 1):
        usage = {"prompt_tokens": 64, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
        delta = {"content": " word"} if count else {"role": "assistant", "content": ""}
        said = {"delta": delta} if is_chat else {"text": " word"}
        choice = {"index": 0, **said, "finish_reason": "length" if count == num_tokens else None}
        events.append(b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n")
    events.append(b"data: [DONE]\n\n")
    chunks = b"".join(f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in events) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


class _Connection(asyncio.Protocol):
    """Waits for the whole body, as Content-Length says, then answers and closes."""

    def __init__(self, completion: bytes, chat: bytes) -> None:
        self._completion, self._chat = completion, chat
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
            if self._received.startswith(b"GET "):  # /metrics
                self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                self._transport.write(self._chat if self._received.startswith(b"POST /v1/chat/") else self._completion)
            self._transport.close()


async def _main(num_tokens: int) -> None:
    answers = completion_stream(num_tokens), completion_stream(num_tokens, is_chat=True)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(*answers), "127.0.0.1", 0, backlog=2048)
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
