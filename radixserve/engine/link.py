"""One life of an engine process, seen from the server: spawn, messages, exit. Knows nothing of requests or restarts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.asyncio

from radixserve.config import EngineConfig
from radixserve.engine import wire
from radixserve.errors import EngineDeadError

ENGINE_COMMAND = (sys.executable, "-m", "radixserve.engine.process")
LAST_WORDS_TIMEOUT_S = 0.1  # after the exit, for messages that are still in the socket


class EngineLink(Protocol):
    """A connection to one engine, used once."""

    async def start(self, config: EngineConfig, log_level: str) -> None:
        """Raises OSError or zmq.ZMQError when this machine gives no socket or no process; stop() cleans up then too."""

    def send(self, message: wire.ClientMessage) -> None:
        """Never blocks, never drops while the engine lives."""

    async def receive(self) -> wire.EngineMessage:
        """Raises EngineDeadError when the engine has ended and all its messages were read."""

    async def stop(self, timeout_s: float) -> None:
        """Ask the engine to leave, then make it; nothing is left behind."""


class ProcessLink:
    """The engine as a child process behind a ZeroMQ socket in a private directory."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # neither end ever drops or blocks: what is under way is bounded by the requests' max_tokens
        self._directory: wire.SocketDirectory | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, config: EngineConfig, log_level: str) -> None:
        self._directory = wire.SocketDirectory()
        self._socket.bind(self._directory.address)
        process = self._process = self._spawn()
        # A child that ended before it read this is no error here: receive() says how it ended.
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(wire.encode(wire.Start(self._directory.address, os.getpid(), config, log_level)))  # far below a pipe's buffer

    def _spawn(self) -> subprocess.Popen[bytes]:
        # From the loop's own thread: the kernel counts the thread that spawned a child as its parent (see die_with_parent).
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        loop = asyncio.get_running_loop()

        def wait_for_exit() -> None:
            process.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._exited.set)

        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()
        return process

    def send(self, message: wire.ClientMessage) -> None:
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.EngineMessage:
        received = asyncio.ensure_future(self._socket.recv())
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({received, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait({received}, timeout=LAST_WORDS_TIMEOUT_S)
            if not received.done():
                raise EngineDeadError(f"the engine process ended {self._describe_exit()}")
        finally:
            exited.cancel()
            if not received.done():
                received.cancel()
        message = wire.decode_engine_message(received.result())
        if isinstance(message, wire.Ready) and self._directory is not None:
            self._directory.remove()  # both ends are connected, and nobody else may ever be
        return message

    def _describe_exit(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        return f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    async def stop(self, timeout_s: float) -> None:
        if self._process is not None and not self._exited.is_set():
            self.send(wire.Shutdown())
            try:
                await asyncio.wait_for(self._exited.wait(), timeout_s)
            except TimeoutError:
                self._process.kill()
                await self._exited.wait()
        self._socket.close(linger=0)
        self._context.term()
        if self._directory is not None:
            self._directory.remove()
        wire.sweep()  # that in which ranks met is left by an engine that was killed
