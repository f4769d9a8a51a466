"""Questions to the engine that have one answer each, under tickets. Knows nothing of requests or of the engine's life."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from radixserve.engine import wire
from radixserve.errors import EngineDeadError

FLUSH_RETRY_INTERVAL_S = 0.02
MIN_FLUSH_ANSWER_S = 1.0  # even a flush that does not wait for requests waits for the step that runs

Answer = wire.Flushed | wire.Stats


class Questions:
    """`send` hands a message to the engine, and raises EngineDeadError when there is none."""

    def __init__(self, send: Callable[[wire.ClientMessage], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._num_tickets = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def ask(self, kind: type[wire.Flush] | type[wire.GetStats], timeout_s: float) -> Answer:
        """Raises EngineDeadError, and TimeoutError after timeout_s.

        A flush whose asker gives up is withdrawn: it must not happen later, behind a long step, by surprise."""
        self._num_tickets += 1
        ticket = self._num_tickets
        self._send(kind(ticket))
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = waiter
        try:
            # no wait_for: in Python 3.11 it loses a cancellation that comes together with the answer
            async with asyncio.timeout(timeout_s):
                return await waiter
        finally:
            if self._waiting.pop(ticket, None) is not None and kind is wire.Flush:
                with contextlib.suppress(EngineDeadError):
                    self._send(wire.WithdrawFlush(ticket))

    async def flush(self, timeout_s: float) -> bool:
        """Ask until the engine was idle; False when it was not, or did not answer, within timeout_s. Raises EngineDeadError."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = await self.ask(wire.Flush, max(deadline - time.monotonic(), MIN_FLUSH_ANSWER_S))
            except TimeoutError:
                return False
            assert isinstance(answer, wire.Flushed)
            if answer.is_done or time.monotonic() >= deadline:
                return answer.is_done
            await asyncio.sleep(FLUSH_RETRY_INTERVAL_S)

    def answer(self, answer: Answer) -> None:
        waiter = self._waiting.pop(answer.ticket, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail_all(self, error: EngineDeadError) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
