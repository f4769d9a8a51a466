"""Questions to the engine that have one answer each, under tickets. Knows nothing of requests or of the engine's life."""

import asyncio
import contextlib
from collections.abc import Callable

from radixserve.engine import wire
from radixserve.errors import EngineDeadError

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

    async def ask(self, kind: type[wire.Flush] | type[wire.GetStats]) -> Answer:
        """Raises EngineDeadError. A flush whose asker gives up is withdrawn: it must not happen later, behind a long step, by surprise."""
        self._num_tickets += 1
        ticket = self._num_tickets
        self._send(kind(ticket))
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = waiter
        try:
            return await waiter
        finally:
            if self._waiting.pop(ticket, None) is not None and kind is wire.Flush:
                with contextlib.suppress(EngineDeadError):
                    self._send(wire.WithdrawFlush(ticket))

    def answer(self, answer: Answer) -> None:
        waiter = self._waiting.pop(answer.ticket, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail_all(self, error: EngineDeadError) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
