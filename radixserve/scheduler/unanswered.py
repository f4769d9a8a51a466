"""Steps that were planned and not answered yet: one while steps are taken one after the other, two while one is planned ahead.

    plan k | plan k+1: rows of k are assumed | answer of k: their tokens are learned | plan k+2: rows of k+1 are assumed | ...

The runner computes them in the order of planning, so a step may read what the one before it writes. Who ends with the answer of k, and
has a row in k+1 all the same, is told once: that row is thrown away, and slot and pages are held until it is answered.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from radixserve.core import ScheduledRow
from radixserve.scheduler.state import RequestState

MAX_STEPS = 2


@dataclass(slots=True)
class PlannedStep:
    step: int
    rows: Sequence[tuple[RequestState, ScheduledRow]]
    planned_at: float
    is_assumed: bool = False  # the rows count as computed


class Unanswered:
    """In order of planning. At most the last one is not assumed."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, planned: PlannedStep) -> None:
        assert len(self._steps) < MAX_STEPS, f"expected at most {MAX_STEPS} steps that were not answered"
        assert all(earlier.is_assumed for earlier in self._steps)
        self._steps.append(planned)

    def take(self, step: int) -> PlannedStep:
        """The oldest, which is answered now."""
        assert self._steps and self._steps[0].step == step, f"expected the output of step {[one.step for one in self._steps]}, got {step}"
        return self._steps.popleft()

    def assume(self) -> Iterator[tuple[RequestState, ScheduledRow]]:
        """The rows of the step that is not assumed yet, if there is one: the caller does it."""
        for planned in self._steps:
            if not planned.is_assumed:
                planned.is_assumed = True
                yield from planned.rows

    def check(self, page_size: int) -> None:
        """Whatever a step under way reads or writes is held by its requests: those pages are in no free list and in no other's hands."""
        for planned in self._steps:
            for state, row in planned.rows:
                assert state.path is not None, f"{state.request.request_id}: its pages went while step {planned.step} was under way"
                assert len(state.path.pages) * page_size >= row.start + row.count, f"{state.request.request_id} gave up pages of {row}"
