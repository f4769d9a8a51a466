"""PendingStep: a step that was launched. On a CPU it is over by then; on a CUDA stream it is queued, and its token ids are on their way to
pinned memory behind it."""

import time
from dataclasses import dataclass, replace

import torch

from radixserve.core import RowLogprobs, ScheduledBatch, StepOutput, StepTimes
from radixserve.kv import pinned
from radixserve.runner.sampler import warn_of_empty


class StepClock:
    """Marks along a step: the host's time on a CPU, events of the current stream on a GPU, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def wait(self) -> None:
        """Until the last mark has been passed."""
        if self._events:
            self._events[-1].synchronize()

    def seconds(self) -> list[float]:
        """Between neighbouring marks, all of which have been passed."""
        if self._is_cuda:
            return [before.elapsed_time(after) / 1e3 for before, after in zip(self._events, self._events[1:])]
        return [after - before for before, after in zip(self._marks, self._marks[1:])]


class HostCopy:
    """A small tensor on its way to the host. Read it once the step's last mark has been passed."""

    def __init__(self, values: torch.Tensor) -> None:
        if values.device.type == "cuda":
            self._host = pinned.empty(values.shape, values.dtype)
            self._host.copy_(values, non_blocking=True)
        else:
            self._host = values

    def read(self) -> list[int]:
        result: list[int] = self._host.tolist()
        return result


@dataclass(frozen=True, slots=True)
class PendingStep:
    batch: ScheduledBatch
    sampled: list[int]  # rows of the batch
    drawn: HostCopy | None  # a token of each; on a GPU, one number more: how many of the rows had no finite logit
    logprobs: tuple[RowLogprobs | None, ...]
    plan_s: float
    wait_s: float  # see StepTimes
    clock: StepClock  # marks: planned, forwarded, over
    parts: list[float]  # seconds of attention, products, norms and rotary, head, where they are measured

    def result(self) -> StepOutput:
        self.clock.wait()
        token_ids = [-1] * len(self.batch.rows)
        if self.drawn is not None:
            drawn = self.drawn.read()
            for index, token_id in zip(self.sampled, drawn):
                token_ids[index] = token_id
            if len(drawn) > len(self.sampled) and drawn[-1]:
                warn_of_empty(drawn[-1], len(self.sampled))
        times = replace(StepTimes(self.plan_s, *self.clock.seconds(), *self.parts), wait_s=self.wait_s)
        return StepOutput(self.batch.step, tuple(token_ids), times, self.logprobs)
