"""Steps on their way through the runner: one by one in the engine's own thread, or two at once, the later one planned ahead.

    engine    | plan k+1 |    wait    | answer k, send | plan k+2 |    wait    | ...
    runner    |---------- step k -----|---------- step k+1 ----------|---------- step k+2 --- ...

Steps run in the order in which they are submitted, each after the one before it. What a step needs of the one before, the K and V that it
wrote and the tokens that it drew, the runner holds itself.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from radixserve.core import ScheduledBatch, StepOutput


class Runner(Protocol):
    def execute(self, batch: ScheduledBatch) -> StepOutput: ...


class PendingOutput(Protocol):
    def result(self) -> StepOutput:
        """Wait for the step's end."""


MAX_LAST_STEP_S = 10.0  # a step that hangs holds nobody up for longer
Launch = Callable[[ScheduledBatch], PendingOutput]


class Pipeline(Protocol):
    max_steps: int  # that may be under way at once

    def __len__(self) -> int:
        """Steps under way: submitted and not collected."""

    def submit(self, batch: ScheduledBatch) -> None: ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way. Raises what the runner raised; nothing can be submitted any more then."""


class OneByOne:
    """A step runs when it is collected."""

    max_steps = 1

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._batch: ScheduledBatch | None = None
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return self._batch is not None

    def submit(self, batch: ScheduledBatch) -> None:
        assert self._batch is None, "expected the last step to be collected first"
        if self._error is not None:
            raise self._error
        self._batch = batch

    def collect(self) -> StepOutput:
        assert self._batch is not None, "expected a step under way"
        if self._error is not None:
            raise self._error
        try:
            output = self.runner.execute(self._batch)
        except BaseException as error:
            self._error = error  # the step stays under way, as the scheduler believes: whoever asks for it again hears why
            raise
        self._batch = None
        return output


class Overlapped:
    """A thread launches each step as soon as the one before it is launched. On a CPU a launched step is a finished one; on a GPU it is
    queued, and the engine's thread waits for its end. The thread lives as long as this object, and to the end of its step."""

    max_steps = 2

    def __init__(self, launch: Launch) -> None:
        self._batches: SimpleQueue[ScheduledBatch | None] = SimpleQueue()
        self._launched: SimpleQueue[PendingOutput | BaseException] = SimpleQueue()
        self._num_under_way = 0
        self._error: BaseException | None = None
        # a daemon: a step that hangs must not keep a process that is to end
        thread = threading.Thread(target=_launch_all, args=(launch, self._batches, self._launched), name="runner", daemon=True)
        thread.start()
        # also at the interpreter's exit, before it takes away what the thread still uses
        weakref.finalize(self, _end, self._batches, thread)

    def __len__(self) -> int:
        return self._num_under_way

    def submit(self, batch: ScheduledBatch) -> None:
        assert self._num_under_way < self.max_steps, f"expected at most {self.max_steps} steps under way"
        if self._error is not None:
            raise self._error
        self._batches.put(batch)
        self._num_under_way += 1

    def collect(self) -> StepOutput:
        assert self._num_under_way, "expected a step under way"
        if self._error is not None:
            raise self._error
        launched = self._launched.get()
        try:
            if isinstance(launched, BaseException):
                raise launched
            output = launched.result()
        except BaseException as error:  # a GPU's own errors come to light only where somebody waits for it
            self._error = error
            raise
        self._num_under_way -= 1
        return output


def _end(batches: "SimpleQueue[ScheduledBatch | None]", thread: threading.Thread) -> None:
    batches.put(None)
    if thread is not threading.current_thread():  # which may be the one that collects the garbage
        thread.join(MAX_LAST_STEP_S)


def _launch_all(
    launch: Launch, batches: "SimpleQueue[ScheduledBatch | None]", launched: "SimpleQueue[PendingOutput | BaseException]"
) -> None:
    """Nothing is launched behind a step that failed: it may have left anything."""
    while (batch := batches.get()) is not None:
        try:
            launched.put(launch(batch))
        except BaseException as error:
            launched.put(error)
            return
        del batch
