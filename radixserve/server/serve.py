"""run_server: from two configs to a serving process and back to an exit status. Owns signals, the engine's life and the drain."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import uvicorn

from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.engine.garbage import spare_pauses
from radixserve.engine.info import EngineInfo
from radixserve.engine.link import EngineLink, ProcessLink
from radixserve.errors import ConfigError, EngineDeadError, ShuttingDownError, UnavailableError
from radixserve.models.location import resolve_model
from radixserve.server.app import create_app
from radixserve.server.gate import Gate
from radixserve.server.protocol import HttpProtocol
from radixserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("radixserve.server")

LAST_WORDS_TIMEOUT_S = 1.0  # for the error events of requests that were cut
LAST_BYTES_TIMEOUT_S = 1.0  # for clients to take what was written for them
_BACKLOG = 2048


def run_server(engine_config: EngineConfig, server_config: ServerConfig, *, make_link: Callable[[], EngineLink] = ProcessLink) -> int:
    """Serve until a signal. Returns the exit status: 0 after SIGTERM, SIGHUP or SIGINT, 1 when the engine died too often.

    Raises ConfigError for an address that cannot be had, ModelError, and EngineDeadError with the engine's words when it cannot start.
    """
    import uvloop

    logging.basicConfig(
        level=server_config.log_level.upper(), format="%(asctime)s %(message)s", datefmt="[%Y-%m-%d %H:%M:%S]", stream=sys.stderr
    )
    listener = _bind(server_config)
    with listener:
        # Once, here: a hub name that were looked up by each process could give tokenizer and weights of two revisions.
        location = resolve_model(engine_config.model_path)
        engine_config = dataclasses.replace(engine_config, model_path=str(location.path))
        server_config = dataclasses.replace(server_config, served_model_name=server_config.served_model_name or location.name)
        tokenizer = Tokenizer.from_directory(location.path)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Serving(engine_config, server_config, make_link).run(listener, tokenizer))


def _bind(config: ServerConfig) -> socket.socket:
    """Before the model is loaded, so that a taken port costs no wait.

    It listens at once: two servers may both bind a port that neither listens on. Who connects early waits until the server is ready.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host, --port: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return listener


class _Server(uvicorn.Server):
    """Leaves signals alone (a SIGTERM has to drain first), and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Everything that will ever be sent was written before: whoever has not taken it in time is cut off here."""
        for server in self.servers:
            server.close()
        connections: set[Any] = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_BYTES_TIMEOUT_S):
                while connections:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Serving:
    """One run of the server: start, wait for a reason to end, end."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig, make_link: Callable[[], EngineLink]) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._make_link = make_link
        self._drain_asked = asyncio.Event()
        self._stop_asked = asyncio.Event()

    async def run(self, listener: socket.socket, tokenizer: Tokenizer) -> int:
        self._listen_to_signals()
        engine = await self._unless_asked_to_end(self._start_engine())
        if engine is None:
            return 0
        try:
            return await self._serve(engine, listener, tokenizer)
        finally:
            await engine.stop()

    async def _start_engine(self) -> AsyncEngine:
        return await AsyncEngine.start(self._engine_config, log_level=self._config.log_level, make_link=self._make_link)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def on_signal(asked: asyncio.Event) -> None:
            # the second signal of any kind ends what the first began
            (self._stop_asked if self._drain_asked.is_set() else asked).set()

        loop.add_signal_handler(signal.SIGTERM, on_signal, self._drain_asked)
        loop.add_signal_handler(signal.SIGINT, on_signal, self._stop_asked)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is what nohup asks for
            loop.add_signal_handler(signal.SIGHUP, on_signal, self._drain_asked)

    async def _unless_asked_to_end(self, starting: Coroutine[Any, Any, AsyncEngine]) -> AsyncEngine | None:
        start = asyncio.create_task(starting)
        await _first_of(start, self._drain_asked.wait(), self._stop_asked.wait())
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return None

    async def _serve(self, engine: AsyncEngine, listener: socket.socket, tokenizer: Tokenizer) -> int:
        app = create_app(engine, tokenizer, self._config)
        gate: Gate = app.state.context.gate
        server = _Server(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=2,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await _first_of(serving, server.is_listening.wait())
        spare_pauses()
        _announce(engine.info, app.state.context.served_name, listener, tells_all=self._config.log_level in ("debug", "info"))
        gave_up = asyncio.create_task(engine.wait_given_up())
        await _first_of(serving, gave_up, self._drain_asked.wait(), self._stop_asked.wait())
        status = 1 if gave_up.done() else 0
        reason = EngineDeadError("the engine died too often") if status else ShuttingDownError("the server is shutting down")
        await self._empty(gate, engine, reason)
        server.should_exit = True
        gave_up.cancel()
        await serving
        return status

    async def _empty(self, gate: Gate, engine: AsyncEngine, reason: UnavailableError) -> None:
        """Let nothing in; on SIGTERM or SIGHUP let what runs finish; cut the rest and give its last words time to get out."""
        gate.close()
        engine.replace_no_more()
        if self._drain_asked.is_set():
            logger.info("draining: no new requests; running ones have %g s", self._config.drain_timeout_s)
            await _first_of(gate.wait_empty(self._config.drain_timeout_s), self._stop_asked.wait())
        if gate.num_inside:
            logger.info("stopping: %d requests are cut", gate.num_inside)
        engine.cut_all(reason)
        await gate.wait_empty(LAST_WORDS_TIMEOUT_S)


def _announce(info: EngineInfo, served_name: str, listener: socket.socket, tells_all: bool) -> None:
    """The address in any case: it is not known before where the port is 0."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    cache = "radix cache off" if info.is_radix_cache_disabled else f"radix cache on ({info.radix_eviction_policy})"
    policy = f"{info.schedule_policy}, {cache}, overlap {info.overlap_schedule}"
    size = f"{info.max_total_tokens} tokens ({info.pool_size_bytes / 2**20:.0f} MiB)"
    size += "" if info.kv_cache_dtype == "auto" else f" of {info.kv_cache_dtype}"
    kernels = f"attention {info.attention_backend}, linears {info.linear_backend}"
    weights = info.dtype if info.quantization == "none" else f"{info.dtype}, {info.quantization} weights"
    ranks = f", {info.tp_size} ranks" if info.tp_size > 1 else ""
    if tells_all:
        print(f"model {served_name} ({weights} on {info.device}{ranks}), {kernels}, context {info.context_length} tokens")
        print(f"pool {size}, page size {info.page_size}, policy {policy}")
    print(f"radixserve is ready on http://{host}:{port}", flush=True)


async def _first_of(*awaitables: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Wait until one is done. Coroutines are cancelled then; tasks that were passed in go on."""
    tasks = [awaitable if isinstance(awaitable, asyncio.Task) else asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables):
            if task is not awaitable:
                task.cancel()
