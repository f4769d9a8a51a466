"""Preemption: who of the running requests gives way to a more urgent one that finds no slot or no room.

A victim's priority is lower than the head's by more than --priority-scheduling-preemption-threshold, and it would stand behind the head if
it waited: one that has aged past the head (order/policies.py) runs on. So nobody is preempted for ever: its place among the waiting is
that of its arrival, and sooner or later whoever comes stands behind it.
"""

from collections.abc import Callable, Iterable

from radixserve.scheduler.pressure import expected_pages
from radixserve.scheduler.state import RequestState


def give_way_to(
    head: RequestState, running: Iterable[RequestState], threshold: int, stands_before: Callable[[RequestState, RequestState], bool]
) -> list[RequestState]:
    """Those who may be retracted for the head, in that order: lowest priority, then latest arrival."""
    victims = [
        state
        for state in running
        if head.request.priority - state.request.priority > threshold and not state.is_guaranteed and stands_before(head, state)
    ]
    return sorted(victims, key=lambda state: (state.request.priority, -state.arrival))


def most_pages(victims: Iterable[RequestState], ratio: float, page_size: int) -> int:
    """What their retraction gives at most: others may hold the same pages."""
    return sum(state.num_pages + expected_pages(state, ratio, page_size) for state in victims)
