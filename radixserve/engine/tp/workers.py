"""Workers: the processes of ranks 1 .. tp_size - 1, seen from rank 0: start, answers, steps, and how one ended.

They end with this process, however it ends, and when Workers is collected.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from radixserve.config import EngineConfig
from radixserve.core import IntArray, ScheduledBatch
from radixserve.engine.tp import messages
from radixserve.engine.wire import SocketDirectory
from radixserve.errors import ConfigError, EngineDeadError

COMMAND = (sys.executable, "-m", "radixserve.engine.tp.worker")
LAST_WORDS_TIMEOUT_S = 5.0  # for ranks that lost a third one: they end too, and the first cause is wanted
NO_IDS: IntArray = array("i")


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    answers: BinaryIO

    def send(self, frame: bytes) -> None:
        """BrokenPipeError where it has ended."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(frame)
        stdin.flush()


class Workers:
    """Starts them; each loads its part of the weights at once. EngineDeadError or ConfigError say which rank failed, and how."""

    def __init__(self, config: EngineConfig, model_path: str, command: Sequence[str] = COMMAND) -> None:
        self._directory = SocketDirectory()
        self.directory: Path = self._directory.path
        self._failure: EngineDeadError | ConfigError | None = None
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._workers, self._directory)
        for rank in range(1, config.tp_size):
            self._workers.append(_spawn(rank, command))
        level = logging.getLogger().getEffectiveLevel()
        for worker in self._workers:
            is_main = threading.current_thread() is threading.main_thread()
            setup = messages.Setup(worker.rank, config, model_path, str(self.directory), os.getpid(), is_main, level)
            self._send(worker, messages.encode(setup))

    def wait_loaded(self) -> int:
        """The fewest pages that one of them has memory for."""
        answers = [self._answer(worker) for worker in self._workers]
        return min(answer.num_pages for answer in answers if isinstance(answer, messages.Loaded))

    def allocate(self, num_pages: int, attention_backend: str) -> None:
        frame = messages.encode(messages.Allocate(num_pages, attention_backend))
        for worker in self._workers:
            self._send(worker, frame)
        for worker in self._workers:
            self._answer(worker)

    def send_step(self, batch: ScheduledBatch, decode_ids: IntArray) -> None:
        frame = messages.encode(messages.Step(_without_requests(batch), decode_ids))
        for worker in self._workers:
            self._send(worker, frame)

    def check(self) -> None:
        """EngineDeadError when one has ended."""
        if self._failure is not None:
            raise self._failure
        if any(worker.process.poll() is not None for worker in self._workers):
            raise self.failure()

    def failure(self) -> EngineDeadError | ConfigError:
        """Called when one has ended or will soon: the first cause, as an error. All of them are made to end."""
        if self._failure is None:
            self._failure = self._first_cause()
        self.end()
        return self._failure

    def end(self) -> None:
        """Nothing is left behind, and nothing can be computed any more."""
        if self._failure is None:
            self._failure = EngineDeadError("tensor parallelism: the other ranks were ended after an error of rank 0; see the log")
        self._finalizer()

    def on_death(self, act: Callable[[], None]) -> None:
        """Call act(), from a thread, when one ends: for whoever waits in a collective that does not notice by itself."""
        for worker in self._workers:
            threading.Thread(target=_act_after, args=(worker.process, act), name=f"rank-{worker.rank}-exit", daemon=True).start()

    def _send(self, worker: _Worker, frame: bytes) -> None:
        try:
            worker.send(frame)
        except BrokenPipeError:
            raise self.failure() from None

    def _answer(self, worker: _Worker) -> messages.Loaded | messages.Allocated:
        answer = messages.read_from_rank(worker.answers)
        if isinstance(answer, messages.Failed):
            self._failure = _as_error(worker.rank, answer)
        if answer is None or isinstance(answer, messages.Failed):
            raise self.failure()
        return answer

    def _first_cause(self) -> EngineDeadError | ConfigError:
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
        while True:
            ended = [worker for worker in self._workers if worker.process.poll() is not None]
            causes = [error for error in map(_cause, ended) if error is not None]
            if causes:
                return causes[0]
            if len(ended) == len(self._workers) or time.monotonic() > deadline:
                return EngineDeadError("tensor parallelism: the ranks lost each other; see the log")
            time.sleep(0.01)


def _spawn(rank: int, command: Sequence[str]) -> _Worker:
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen((*command, str(writing)), stdin=subprocess.PIPE, pass_fds=(writing,))
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)  # the worker's is then the only one, and its end is the pipe's
    return _Worker(rank, process, os.fdopen(reading, "rb"))


def _end(workers: list[_Worker], directory: SocketDirectory) -> None:
    """They hold nothing that has to be saved."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        with contextlib.suppress(OSError):  # what it did not read is lost
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        worker.answers.close()
    directory.remove()


def _act_after(process: "subprocess.Popen[bytes]", act: Callable[[], None]) -> None:
    process.wait()
    act()


def _cause(worker: _Worker) -> EngineDeadError | ConfigError | None:
    """Why a worker ended; None where it only lost another rank."""
    status = worker.process.returncode
    if status == messages.LOST_STATUS:
        return None
    while (answer := messages.read_from_rank(worker.answers)) is not None:
        if isinstance(answer, messages.Failed):
            return _as_error(worker.rank, answer)
    how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return EngineDeadError(f"the process of tensor-parallel rank {worker.rank} ended {how}")


def _as_error(rank: int, failed: messages.Failed) -> EngineDeadError | ConfigError:
    kind = ConfigError if failed.is_users else EngineDeadError
    return kind(f"tensor-parallel rank {rank}: {failed.message}")


def _without_requests(batch: ScheduledBatch) -> ScheduledBatch:
    """A prompt of many chunks would else travel whole with its first."""
    rows = (row if row.request is None else dataclasses.replace(row, request=None, output_ids=NO_IDS) for row in batch.rows)
    return dataclasses.replace(batch, rows=tuple(rows))
