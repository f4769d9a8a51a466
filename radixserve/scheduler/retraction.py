"""Retractions: running requests are put back to wait, for want of pages, in favour of a more urgent one, or because a test wants it."""

import logging
from collections.abc import Callable, Iterator

from radixserve.config import SchedulerConfig
from radixserve.metrics import EngineStats
from radixserve.scheduler.ends import End, end_short
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.pressure import NewTokenRatio, forced_victim, loses_least
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState

logger = logging.getLogger("radixserve.engine")


class Retractions:
    """Call it before any row of a step is planned, and with no step under way: who is put back to wait takes all its tokens along.

    `preempted` says who gives way to a more urgent one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        running: RunningRequests,
        ratio: NewTokenRatio,
        totals: EngineStats,
        forced_interval: int | None,
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._running = running
        self._ratio = ratio
        self._totals = totals
        self._forced_interval = forced_interval

    def retract(self, state: RequestState, now: float) -> None:
        """Put it where its arrival belongs. What it computed goes into the tree; it goes on from there."""
        self._running.stop(state, now, False)
        state.retract()
        self._waiting.add(state)
        self._totals.retracted_total += 1

    def give_way(self, victim: RequestState, now: float) -> None:
        """A retraction that counts: who had --max-retractions of them runs to its end."""
        victim.num_retractions += 1
        victim.is_guaranteed = victim.num_retractions >= self._config.max_retractions
        self.retract(victim, now)

    def are_due(self, step: int, preempted: Callable[[], list[RequestState]]) -> bool:
        """Whether make_all() would do anything, as far as can be said while a step is under way."""
        return self._is_forced(step) or self._running.num_missing_pages() > 0 or bool(preempted())

    def make_all(self, step: int, preempted: Callable[[], list[RequestState]], now: float) -> Iterator[End]:
        """Who takes an End takes the request out before asking for the next one."""
        self.force(step, now)
        yield from self.relieve(now)
        for victim in preempted():
            self.give_way(victim, now)

    def _is_forced(self, step: int) -> bool:
        return self._forced_interval is not None and step % self._forced_interval == 0

    def force(self, step: int, now: float) -> None:
        """For tests: every so many steps somebody."""
        if self._is_forced(step):
            victim = forced_victim(self._running.values(), step)
            if victim is not None:
                self.retract(victim, now)

    def relieve(self, now: float) -> Iterator[End]:
        """Make room for all who run to go on: eviction alone, or the one that loses least gives way, and again.

        Who takes an End takes the request out before asking for the next one.
        """
        num_before = self._totals.retracted_total
        while self._running.num_missing_pages() > 0:
            candidates = [state for state in self._running.values() if not state.is_guaranteed]
            if len(self._running) == 1 or not candidates:
                # somebody who is no request holds pages
                yield end_short(loses_least(self._running.values()))
                continue
            self.give_way(loses_least(candidates), now)
        num_retracted = self._totals.retracted_total - num_before
        if num_retracted:
            ratio_before = self._ratio.value
            self._ratio.after_retraction(self._running.values())
            text = "KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: %.4f -> %.4f"
            logger.info(text, num_retracted, ratio_before, self._ratio.value)
