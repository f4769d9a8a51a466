"""Starts radixserve servers for a comparison, reads their /metrics, stops them. Only processes started here are ever signalled."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.client import RequestFailedError, fetch


class ServerStartError(Exception):
    """The server ended, or was not healthy in time; the message has the end of its log."""


class Server:
    """One `radixserve serve` on a free port of the loopback; an async context manager. Its log goes to a temporary file."""

    def __init__(self, label: str, flags: Sequence[str], start_timeout_s: float = 900.0) -> None:
        self.label = label
        self._start_timeout_s = start_timeout_s
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.command = [sys.executable, "-m", "radixserve", "serve", "--port", str(self._port), *flags]

    async def __aenter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile(prefix=f"radixserve-{self.label}-", suffix=".log")  # noqa: SIM115 closed in __aexit__
        # a session of its own: Ctrl-C in the terminal reaches us alone, and we stop the server in order
        self._process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: ASYNC220
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._is_healthy():
                    if self._process.poll() is not None:
                        raise ServerStartError(f"{' '.join(self.command)} ended with {self._process.returncode}:\n{self.log_tail()}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            await self.__aexit__()
            raise ServerStartError(f"{self.label}: not healthy within {self._start_timeout_s} s:\n{self.log_tail()}") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, 60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        """SIGKILL, as a machine that is lost: to try what stands in front."""
        self._process.kill()

    def log_tail(self, num_bytes: int = 3000) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-num_bytes:]

    async def _is_healthy(self) -> bool:
        try:
            status, _ = await fetch(self.url, "GET", "/health", timeout_s=5)
        except (OSError, TimeoutError, RequestFailedError):
            return False
        return status == 200


def _free_port() -> int:
    # free now, taken by the server a moment later: fine for a bench
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The exporter's names, in this one place.
STEP_SECONDS = "radixserve_step_seconds_total"  # label part=
PREFILL_STEP_SECONDS = "radixserve_prefill_step_seconds_total"
PREFILL_STEP_DECODE_ROWS = "radixserve_prefill_step_decode_rows_total"
DECODE_STEP_SECONDS = "radixserve_decode_step_seconds_total"
DECODE_STEP_ROWS = "radixserve_decode_step_rows_total"
_FIELDS = {
    PREFILL_STEP_SECONDS: "mixed_s",
    PREFILL_STEP_DECODE_ROWS: "mixed_decode_rows",
    DECODE_STEP_SECONDS: "decode_s",
    DECODE_STEP_ROWS: "decode_rows",
}


@dataclass(frozen=True, slots=True)
class StepClock:
    """Seconds of the engine's steps so far: by part ("tree", "schedule", "forward", ...), and by kind of step."""

    parts: dict[str, float]
    mixed_s: float = 0.0  # steps that held a prompt chunk
    mixed_decode_rows: float = 0.0  # decode rows that ran in them
    decode_s: float = 0.0  # steps of decode rows alone
    decode_rows: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def mixed_share(self) -> float | None:
        """Share of the steps that held a prompt chunk in the step time, their decode rows included; None if unknown."""
        return self.mixed_s / self.total_s if self.total_s > 0 and self.mixed_s > 0 else None

    @property
    def prefill_share(self) -> float | None:
        """f: the share of prefill in the step time. A decode row in a mixed step is taken off at what one costs in the other steps."""
        if self.mixed_share is None:
            return None
        row_s = self.decode_s / self.decode_rows if self.decode_rows > 0 else 0.0
        return max(0.0, self.mixed_s - self.mixed_decode_rows * row_s) / self.total_s

    def share(self, *names: str) -> float | None:
        """Share of the named parts in the step time; None if there was no step."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.total_s if self.total_s > 0 else None

    def since(self, earlier: "StepClock") -> "StepClock":
        parts = {name: value - earlier.parts.get(name, 0.0) for name, value in self.parts.items()}
        return StepClock(parts, **{field: getattr(self, field) - getattr(earlier, field) for field in _FIELDS.values()})


def parse_step_clock(exposition: str) -> StepClock:
    """From the text of /metrics; counters that are not there count as nothing."""
    from prometheus_client.parser import text_string_to_metric_families

    parts: dict[str, float] = {}
    sums = dict.fromkeys(_FIELDS.values(), 0.0)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == STEP_SECONDS:
                parts[sample.labels["part"]] = parts.get(sample.labels["part"], 0.0) + sample.value
            elif sample.name in _FIELDS:
                sums[_FIELDS[sample.name]] += sample.value
    return StepClock(parts, **sums)


async def read_step_clock(url: str) -> StepClock:
    """GET /metrics. Raises RequestFailedError if it does not answer 200."""
    status, body = await fetch(url, "GET", "/metrics")
    if status != 200:
        raise RequestFailedError(f"/metrics: HTTP {status}")
    return parse_step_clock(body.decode())
