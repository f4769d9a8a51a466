"""Reads a server's gauges while a run goes on. Two small requests a second: the same on every server, so none is favoured."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from bench.experiment.counters import EVICTED_TOKENS, GAUGES, RETRACTED
from bench.experiment.results import Sample
from bench.metrics import read_metrics

NAMES = (*GAUGES, EVICTED_TOKENS, RETRACTED)


class Sampler:
    """An async context manager around a run; then `samples` holds what was read, times in seconds since it was entered."""

    def __init__(self, url: str, interval_s: float) -> None:
        self._url = url
        self._interval_s = interval_s
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._task = asyncio.create_task(self._read_on())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _read_on(self) -> None:
        while True:
            figures = await read_metrics(self._url, NAMES)
            if figures is None:
                return  # a server without /metrics has nothing to tell later either
            self.samples.append(Sample(time.perf_counter() - self._started_at, figures))
            await asyncio.sleep(self._interval_s)
