"""Starts servers for a comparison and stops them, with all that they started. Only processes started here are ever signalled."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from bench.client import RequestFailedError, fetch

STOP_TIMEOUT_S = 60.0


class ServerStartError(Exception):
    """The server ended, or was not healthy in time; the message has the end of its log."""


class Server:
    """One `radixserve serve` with `flags`, or `command` with {port} filled in, on a free port of the loopback; an async context manager.

    Its log goes to a temporary file. `env` is added to this process's environment; `health` is the path that answers 200 when it is ready.
    """

    def __init__(
        self,
        label: str,
        flags: Sequence[str] = (),
        start_timeout_s: float = 900.0,
        *,
        command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        health: str = "/health",
    ) -> None:
        self.label = label
        self._start_timeout_s = start_timeout_s
        self._env = {**os.environ, **(env or {})}
        self._health = health
        port = str(_free_port())
        self.url = f"http://127.0.0.1:{port}"
        own = [sys.executable, "-m", "radixserve", "serve", "--port", port, *flags]
        self.command = [part.replace("{port}", port) for part in command] if command else own

    async def __aenter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile(prefix=f"server-{self.label}-", suffix=".log")  # noqa: SIM115 closed in __aexit__
        try:
            # a session of its own: Ctrl-C in the terminal reaches us alone, and we stop the server in order
            self._process = subprocess.Popen(  # noqa: ASYNC220
                self.command, stdout=self._log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )
        except OSError as error:
            raise ServerStartError(f"{self.label}: {shlex.join(self.command)}: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until_healthy()
        except TimeoutError:
            await self.__aexit__()
            limit = f"not healthy within {self._start_timeout_s:g} s"
            raise ServerStartError(f"{self.label}: {limit}; the end of its log:\n{self._tail}") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _until_healthy(self) -> None:
        while not await self._is_healthy():
            if self._process.poll() is not None:
                end = f"{shlex.join(self.command)} ended with {self._process.returncode}"
                raise ServerStartError(f"{self.label}: {end}; the end of its log:\n{self.log_tail()}")
            await asyncio.sleep(0.2)

    async def __aexit__(self, *_: object) -> None:
        self._tail = self.log_tail()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            # shielded: a second Ctrl-C must not leave it half stopped
            await asyncio.shield(asyncio.to_thread(self._wait))
        # what it left in its process group, and nothing else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()

    def _wait(self) -> None:
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """SIGKILL, as a machine that is lost: to try what stands in front."""
        self._process.kill()

    def log_tail(self, num_bytes: int = 3000) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-num_bytes:]

    async def _is_healthy(self) -> bool:
        try:
            status, _ = await fetch(self.url, "GET", self._health, timeout_s=5)
        except (OSError, TimeoutError, RequestFailedError):
            return False
        return status == 200


def _free_port() -> int:
    # free now, taken by the server a moment later: fine for a bench
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
