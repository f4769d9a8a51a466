"""Preemption: who of the running requests gives way to a more urgent one that finds no slot or no room.

A victim's priority is lower than the head's by more than --priority-scheduling-preemption-threshold, and it would stand behind the head if
it waited: one that has aged past the head (order/policies.py) runs on. So nobody is preempted for ever: its place among the waiting is
that of its arrival, and sooner or later whoever comes stands behind it. Besides, each preemption counts as one of its --max-retractions,
and who has no new output since it gave way last does not give way again.
"""

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

    def victims(self, new_token_ratio: float, max_step_tokens: int, max_prompt_tokens: int) -> list[RequestState]:
        """Requests to retract so that the head of the queue can be admitted in this very step; none if all of them would not be enough."""
        if self._config.disable_priority_preemption or not self._waiting or not self._running:
            return []
        lowest = min(state.request.priority for state in self._running.values())
        if self._waiting.highest_priority - lowest <= self._config.priority_scheduling_preemption_threshold:
            return []
        self._waiting.start_pass(self._running.values())
        head = self._waiting.head()
        victims = self._enough(head, self._below(head), new_token_ratio) if head is not None else []
        if not victims:
            return []
        # prompts that are being computed go first: where they take the whole step, the head would not come in
        staying = [state for state in self._running.values() if state not in victims]
        num_decoding = sum(state.is_decoding for state in staying)
        num_prefilling = sum(state.num_uncomputed for state in staying if not state.is_decoding)
        return victims if num_prefilling < min(max_step_tokens - num_decoding, max_prompt_tokens) else []

    def _below(self, head: RequestState) -> list[RequestState]:
        """Lowest priority first, then latest arrival."""
        limit = head.request.priority - self._config.priority_scheduling_preemption_threshold
        below = [
            state
            for state in self._running.values()
            if state.request.priority < limit
            and not state.is_guaranteed
            and state.num_output > state.num_output_at_retraction
            and self._waiting.stands_before(head, state)
        ]
        return sorted(below, key=lambda state: (state.request.priority, -state.arrival))

    def _enough(self, head: RequestState, candidates: list[RequestState], ratio: float) -> list[RequestState]:
        """The first of the candidates whose slots and pages suffice for the head, together with what is free; none if all do not."""
        self._room.recount()
        match = self._cache.match(head.request.namespace, head.token_ids, head.max_cached)
        num_lacking = self._room.num_lacking(head, match)
        if self._running.num_free_slots and num_lacking <= 0:
            return []
        held = self._cache.num_given_back([state.path for state in candidates if state.path is not None], match)
        num_expected = 0
        for count, (state, num_pages) in enumerate(zip(candidates, held, strict=True), 1):
            num_expected += expected_pages(state, ratio, self._cache.page_size)
            if num_pages + num_expected >= num_lacking:
                return candidates[:count]
        return []
