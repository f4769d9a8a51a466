"""Who was overtaken how often: the lanes of order/bound.py against a count of every admission, and what many lanes cost."""

import dataclasses
import random

import pytest

from radixserve.config import SchedulerConfig
from radixserve.scheduler.order.bound import Overtakings
from radixserve.scheduler.order.tour import Key
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.helpers import request
from tests.support.calls import calls_per_admission


def make_state(number: int, priority: int) -> RequestState:
    one = request(str(number), [number % 50, number, 3, 4])
    return RequestState(dataclasses.replace(one, priority=priority), 0.0, 10, number)


@dataclasses.dataclass
class Waiting:
    state: RequestState
    key: Key
    lane: tuple[int, int]
    begun: int  # admissions before


class Twin:
    """Counts everything anew."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting: list[Waiting] = []
        self.admitted: list[Key] = []

    def is_overdue(self, one: Waiting) -> bool:
        return sum(key > one.key for key in self.admitted[one.begun :]) >= self.limit

    def bar(self, oldest: Waiting) -> Key | None:
        if self.is_overdue(oldest):
            return oldest.key
        lanes = {one.lane for one in self.waiting} - {oldest.lane}
        firsts = [min((one for one in self.waiting if one.lane == lane), key=lambda one: one.key) for lane in lanes]
        return min((max(one.key, oldest.key) for one in firsts if self.is_overdue(one)), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_lanes_against_a_count_of_every_admission(seed: int) -> None:
    rng = random.Random(seed)
    limit, num_classes, aging = rng.choice([1, 2, 3, 8]), rng.choice([1, 3, 40]), rng.choice([1, 3, 256])
    twin, kept = Twin(limit), Overtakings(limit)
    ran: list[tuple[RequestState, Key]] = []
    num_passes = num_added = 0
    for _ in range(200):
        choice = rng.random()
        if choice < 0.15 and ran:
            state, key = ran.pop(rng.randrange(len(ran)))
            twin.waiting.append(Waiting(state, key, (1, state.arrival), len(twin.admitted)))
            kept.add(state, key, comes_back=True)
        elif choice < 0.45:
            state = make_state(num_added, rng.randrange(num_classes))
            key = (num_passes - aging * state.request.priority, num_added)
            twin.waiting.append(Waiting(state, key, (0, state.request.priority), len(twin.admitted)))
            kept.add(state, key, comes_back=False)
            num_added += 1
        elif twin.waiting:
            # mostly the latest one: it passes all others
            one = max(twin.waiting, key=lambda one: one.key) if rng.random() < 0.4 else rng.choice(twin.waiting)
            if choice > 0.6:
                kept.admitted(one.key)
                twin.admitted.append(one.key)
                ran.append((one.state, one.key))
                num_passes += rng.random() < 0.5
            kept.remove(one.state)
            twin.waiting.remove(one)
        assert kept.is_any_overdue == any(map(twin.is_overdue, twin.waiting))
        for one in twin.waiting:
            assert kept.is_overdue(one.state, one.key) == twin.is_overdue(one)
            assert kept.bar(one.state, one.key) == twin.bar(one)
    for one in twin.waiting:
        kept.remove(one.state)
    assert not any((kept._lanes, kept._places, kept._lane_of, kept._firsts, kept._overdue)), "something is left of nobody"


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
def test_three_thousand_priorities_cost_as_much_as_one(policy: str) -> None:
    """Clients choose them, down to any depth: calls per admission."""
    queue = WaitingQueue(SchedulerConfig(schedule_policy=policy), PrefixCache(1000))
    for number in range(3000):
        queue.add(make_state(number, -number))
    assert calls_per_admission(queue, lambda number: queue.add(make_state(number, -number)), range(3000, 3030)) < 1500
