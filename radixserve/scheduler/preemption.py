"""Preemption: who of the running requests gives way to a more urgent one that finds no slot or no room.

A victim's priority is lower than the head's by more than --priority-scheduling-preemption-threshold, and it would stand behind the head if
it waited: one that has aged past the head (order/policies.py) runs on. So nobody is preempted for ever: its place among the waiting is
that of its arrival, and sooner or later whoever comes stands behind it.
"""

from collections.abc import Iterator

from radixserve.config import SchedulerConfig
from radixserve.scheduler.admission import Room
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.pressure import expected_pages
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PageCache


class Preemption:
    def __init__(self, config: SchedulerConfig, cache: PageCache, waiting: WaitingQueue, running: RunningRequests, room: Room) -> None:
        self._config = config
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._room = room

    def victims(self, new_token_ratio: float) -> Iterator[RequestState]:
        """Requests to retract, until the head of the queue finds a slot and room; none if all of them would not be enough.

        Whoever takes one retracts it before asking for the next.
        """
        if self._config.disable_priority_preemption or not self._waiting or not self._running:
            return
        lowest = min(state.request.priority for state in self._running.values())
        if self._waiting.highest_priority - lowest <= self._config.priority_scheduling_preemption_threshold:
            return
        self._waiting.start_pass(self._running.values())
        head = self._waiting.head()
        candidates = self._below(head) if head is not None else []
        if head is None or not candidates or self._num_lacking(head) > self._most_pages(candidates, new_token_ratio):
            return
        for victim in candidates:
            if self._running.num_free_slots and self._num_lacking(head) <= 0:
                return
            yield victim

    def _below(self, head: RequestState) -> list[RequestState]:
        """Lowest priority first, then latest arrival."""
        limit = head.request.priority - self._config.priority_scheduling_preemption_threshold
        below = [
            state
            for state in self._running.values()
            if state.request.priority < limit and not state.is_guaranteed and self._waiting.stands_before(head, state)
        ]
        return sorted(below, key=lambda state: (state.request.priority, -state.arrival))

    def _num_lacking(self, head: RequestState) -> int:
        self._room.recount()
        return self._room.num_lacking(head, self._cache.match(head.request.namespace, head.token_ids, head.max_cached))

    def _most_pages(self, victims: list[RequestState], ratio: float) -> int:
        """What their retraction gives at most: others may hold the same pages."""
        return sum(state.num_pages + expected_pages(state, ratio, self._cache.page_size) for state in victims)
