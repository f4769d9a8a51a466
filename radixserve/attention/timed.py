"""TimedAttention: another backend with a stopwatch around each run, for --profile-steps; on a CPU, where a run returns when it is done."""

import time

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch


class TimedAttention:
    def __init__(self, backend: AttentionBackend) -> None:
        self.name = backend.name
        self.seconds = 0.0  # in run, of all steps so far
        self._backend = backend

    @property
    def waited_s(self) -> float:
        return self._backend.waited_s

    def plan(self, batch: ForwardBatch) -> None:
        self._backend.plan(batch)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        out = self._backend.run(layer, q, k, v)
        self.seconds += time.perf_counter() - start
        return out
