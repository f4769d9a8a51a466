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
from typing import Any, cast

import orjson
import uvicorn
import uvloop

from radixserve.config import EngineConfig, ServerConfig
from radixserve.core import RequestOutput
from radixserve.engine import wire
from radixserve.engine.client import AsyncEngine
from radixserve.engine.link import ProcessLink
from radixserve.server.app import create_app
from radixserve.server.protocol import HttpProtocol
from radixserve.tokenizer.tokenizer import Tokenizer


class Stamps:
    """When each token's message came and when its bytes were written. While it runs it only notes; the accounts come after the run."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, str, int, float]] = []
        self._pending: list[bytes] = []
        self._written: list[tuple[float, bytes]] = []

    def arrived(self, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        # flat: objects that the collector has to walk would be measured too
        self._arrived += [(now, output.request_id, len(output.token_ids), output.queue_time_s) for output in outputs]

    def written(self, data: bytes, is_in_buffer: bool) -> None:
        """What the socket did not take at once goes out at the end of the loop's turn, before the callbacks of the next one."""
        if not is_in_buffer:
            self._written.append((time.monotonic(), data))
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._stamp_written)
        self._pending.append(data)

    def _stamp_written(self) -> None:
        now = time.monotonic()
        self._written += [(now, data) for data in self._pending]
        self._pending.clear()

    def latencies(self) -> tuple[list[float], list[float]]:
        """Seconds from arrival, and from the engine's own sending, to the write; one of each per token."""
        arrivals: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        for arrived_at, request_id, num_tokens, sent_at in self._arrived:
            arrivals[request_id.removesuffix("-0")].extend([(arrived_at, sent_at)] * num_tokens)
        since_arrival, since_sending = [], []
        for written_at, data in self._written:
            for reply_id, num_tokens in _tokens_in(data):
                for arrived_at, sent_at in [arrivals[reply_id].popleft() for _ in range(num_tokens)]:
                    since_arrival.append(written_at - arrived_at)
                    since_sending.append(written_at - sent_at)
        return since_arrival, since_sending


def _tokens_in(data: bytes) -> Iterator[tuple[str, int]]:
    """(id of the reply, tokens) of each event; every token of the load is one word with the blank before it."""
    for line in data.split(b"\n"):
        if line.startswith(b'data: {"id"'):
            event = orjson.loads(line[6:])
            yield event["id"], sum(choice["text"].count(" ") for choice in event["choices"])


class StampingLink(ProcessLink):
    def __init__(self, command: tuple[str, ...], stamps: Stamps) -> None:
        super().__init__(command)
        self._stamps = stamps

    async def receive(self) -> wire.EngineMessage:
        message = await super().receive()
        if isinstance(message, wire.Outputs):
            self._stamps.arrived(message.outputs)
        return message


class StampingTransport:
    """What the protocol writes to; everything else is the real transport's."""

    def __init__(self, transport: Any, stamps: Stamps) -> None:
        self._transport = transport
        self._stamps = stamps

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        self._stamps.written(data, self._transport.get_write_buffer_size() > 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def stamping_protocol(stamps: Stamps) -> type[HttpProtocol]:
    class StampingProtocol(HttpProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(cast(asyncio.Transport, StampingTransport(transport, stamps)))

    return StampingProtocol


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
    app = create_app(engine, Tokenizer.from_directory(model_dir), ServerConfig())
    protocol = stamping_protocol(stamps)
    config = uvicorn.Config(app, port=0, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, backlog=2048)
    server = _Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    cpu_at, wall_at = time.process_time(), time.monotonic()
    await serving
    cpu_s, wall_s = time.process_time() - cpu_at, time.monotonic() - wall_at
    await engine.stop()
    since_arrival, since_sending = stamps.latencies()
    return {
        "num_tokens": len(since_arrival),
        "arrival_to_write": _percentiles(since_arrival),
        "sending_to_write": _percentiles(since_sending),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
    }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(serve(Path(sys.argv[1]), *sys.argv[2:4]))), flush=True)
