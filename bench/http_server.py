"""The real app over a PacedEngine's process, with two stamps per token: its message's arrival here, and the write to the client's socket.

`python -m bench.http_server MODEL_DIR RATE PHASES`: prints its address, serves until SIGTERM, then prints its figures as one line of JSON.
"""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.config import EngineConfig, ServerConfig
from radixserve.core import RequestOutput
from radixserve.engine import wire
from radixserve.engine.client import AsyncEngine
from radixserve.engine.link import ProcessLink
from radixserve.server.app import create_app
from radixserve.server.protocol import HttpProtocol
from radixserve.tokenizer.tokenizer import Tokenizer


class Stamps:
    """Seconds from arrival, and from the engine's own sending, to the write; one of each per token."""

    def __init__(self) -> None:
        self._arrivals: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._written: list[tuple[float, float]] = []
        self.since_arrival: list[float] = []
        self.since_sending: list[float] = []

    def arrived(self, output: RequestOutput) -> None:
        stamps = (time.monotonic(), output.queue_time_s)
        self._arrivals[output.request_id.removesuffix("-0")].extend([stamps] * len(output.token_ids))

    def handed_over(self, reply_id: str, num_tokens: int) -> None:
        """uvloop writes at the end of the loop's turn, before the callbacks of the next one: there the time is taken."""
        if not self._written:
            asyncio.get_running_loop().call_soon(self._stamp_written)
        arrivals = self._arrivals[reply_id]
        self._written.extend(arrivals.popleft() for _ in range(num_tokens))

    def _stamp_written(self) -> None:
        now = time.monotonic()
        self.since_arrival.extend(now - arrived_at for arrived_at, _ in self._written)
        self.since_sending.extend(now - sent_at for _, sent_at in self._written)
        self._written.clear()


class StampingLink(ProcessLink):
    def __init__(self, command: tuple[str, ...], stamps: Stamps) -> None:
        super().__init__(command)
        self._stamps = stamps

    async def receive(self) -> wire.EngineMessage:
        message = await super().receive()
        if isinstance(message, wire.Outputs):
            for output in message.outputs:
                self._stamps.arrived(output)
        return message


class StampingApp:
    """Outside the app: sees each event as uvicorn gets it. Clients ask for continuous usage, which says how many tokens are in."""

    def __init__(self, app: ASGIApp, stamps: Stamps) -> None:
        self._app = app
        self._stamps = stamps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_sent = 0

        async def stamped_send(message: Message) -> None:
            nonlocal num_sent
            await send(message)
            body = message.get("body", b"")
            if body.startswith(b'data: {"id"'):
                event = orjson.loads(body[6:])
                num_tokens = event["usage"]["completion_tokens"]
                self._stamps.handed_over(event["id"], num_tokens - num_sent)
                num_sent = num_tokens

        await self._app(scope, receive, stamped_send)


class _Server(uvicorn.Server):
    """uvicorn's own handling of signals would end the process before it said what it measured."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{q}_ms": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] for q in (50, 90, 99, 100)} if ordered else {}


async def serve(model_dir: Path, rate: str, phases: str) -> dict[str, Any]:
    stamps = Stamps()
    command = (sys.executable, "-m", "bench.paced_engine", rate, phases)
    engine = await AsyncEngine.start(EngineConfig(model_path=str(model_dir)), make_link=lambda: StampingLink(command, stamps))
    app = StampingApp(create_app(engine, Tokenizer.from_directory(model_dir), ServerConfig()), stamps)
    config = uvicorn.Config(app, port=0, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False, backlog=2048)
    server = _Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    cpu_at, wall_at = time.process_time(), time.monotonic()
    await serving
    figures = {
        "num_tokens": len(stamps.since_arrival),
        "arrival_to_write": _percentiles(stamps.since_arrival),
        "sending_to_write": _percentiles(stamps.since_sending),
        "cpu_s": time.process_time() - cpu_at,
        "wall_s": time.monotonic() - wall_at,
    }
    await engine.stop()
    return figures


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(serve(Path(sys.argv[1]), *sys.argv[2:4]))), flush=True)
