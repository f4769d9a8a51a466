"""What keeps the load generator from its work: its own garbage collection, and a processor that others hold. Kept short, and measured.

A full collection walks every object that the process ever made: 30 ms with nothing loaded, 300 ms with a million objects, in which no
request is sent and no token's time is taken (bench/LOG.md).
"""

import gc
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Pauses:
    """A context manager around a run. Inside, the collector looks only at objects that the run itself made, and at none of them for ever.

    gc_max_s: the longest collection within. core_wait_s: how long this thread was ready to run and had no core; None where the system does
    not tell. Both are there once it has been left.
    """

    def __init__(self) -> None:
        self.gc_max_s = 0.0
        self.core_wait_s: float | None = None
        self._began_at = 0.0

    def __enter__(self) -> Self:
        gc.freeze()
        gc.callbacks.append(self._on_collection)
        self._waited_before = _core_wait_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        waited = _core_wait_s()
        self.core_wait_s = None if waited is None or self._waited_before is None else waited - self._waited_before
        gc.callbacks.remove(self._on_collection)
        gc.unfreeze()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began_at = now
        else:
            self.gc_max_s = max(self.gc_max_s, now - self._began_at)
            if info["generation"] == 2:
                gc.freeze()  # once is enough: else the full collections of a long run get longer and longer


def _core_wait_s() -> float | None:
    """Of this thread since it began: the second figure of Linux's schedstat, in nanoseconds."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
