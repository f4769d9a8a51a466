"""An app on a real socket: in this process over an EchoEngine, or as its own process with its engine's below it."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.server.app import create_app
from radixserve.server.protocol import HttpProtocol
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.thread_link import ThreadLink
from tests.support.waiting import ready_address

ROOT = Path(__file__).resolve().parents[2]


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@dataclass(slots=True)
class Live:
    app: FastAPI
    engine: AsyncEngine
    echo: EchoEngine
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def live_app(
    tokenizer: Tokenizer,
    config: ServerConfig,
    make_echo: Callable[[EngineConfig], EchoEngine] = EchoEngine,
    send_buffer_bytes: int | None = None,
) -> AsyncIterator[Live]:
    """send_buffer_bytes: of the kernel, per connection; small, so that a client that does not read is felt soon."""
    echo = make_echo(EngineConfig())
    engine = await AsyncEngine.start(EngineConfig(), make_link=lambda: ThreadLink(echo))
    app = create_app(engine, tokenizer, config)
    listener = socket.socket()
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    listener.bind(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False))
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield Live(app, engine, echo, server, listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        await serving
        await engine.stop()
        listener.close()


async def send_request(live: Live, method_and_path: str, body: bytes = b"") -> asyncio.StreamWriter:
    """On a connection of its own: close the writer, and the client has left."""
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(f"{method_and_path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


@asynccontextmanager
async def server_process(model_dir: Path, step_s: float) -> AsyncIterator[str]:
    """The address of `echo_server_main` as its own process."""
    command = [sys.executable, "-m", "tests.support.echo_server_main", str(model_dir), str(step_s), "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - starting takes no time
    try:
        yield await asyncio.to_thread(ready_address, process)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        assert process.stdout is not None
        process.stdout.close()
