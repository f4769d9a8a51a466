"""QueueRoom and Scheduler.add refuse by one rule: what the server lets in, the engine takes."""

import random

import pytest

from radixserve.core import RequestOutput
from radixserve.engine.queue_room import QueueRoom
from radixserve.errors import QueueFullError
from tests.pure.bench import Bench
from tests.pure.helpers import request

ROWS, LIMIT = 3, 2


class Pair:
    """A scheduler, and the room as the server keeps it: entered when sent, left when a final output has come."""

    def __init__(self, seed: int, has_retractions: bool) -> None:
        self.random = random.Random(seed)
        self.bench = Bench(rows=ROWS, forced=3 if has_retractions else None, max_queued_requests=LIMIT)
        self.room = QueueRoom(LIMIT)
        self.room.num_slots = ROWS
        self.under_way: list[RequestOutput] = []
        self.names: list[str] = []

    def has_room(self, num_requests: int = 1) -> bool:
        try:
            self.room.require(num_requests)
        except QueueFullError:
            return False
        return True

    def add(self) -> bool:
        """Whether the scheduler took it."""
        name = str(len(self.names))
        self.names.append(name)
        prompt = [self.random.randrange(2, 50) for _ in range(self.random.randrange(1, 20))]
        try:
            self.bench.add(request(name, prompt, self.random.randrange(1, 6)))
        except QueueFullError:
            return False
        self.room.enter(name)
        return True

    def disturb(self) -> None:
        """An abort or a finish, of somebody or of nobody; or a step."""
        name = self.random.choice(self.names) if self.names else "nobody"
        match self.random.randrange(4):
            case 0:
                self.bench.scheduler.abort(name)
            case 1:
                self.bench.scheduler.finish(name, 1)
            case _:
                self.under_way += self.bench.step()

    def deliver(self) -> None:
        for output in self.under_way:
            if output.is_final:
                self.room.leave(output.request_id)
        self.under_way.clear()


@pytest.mark.parametrize("has_retractions", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_with_all_news_delivered_both_say_the_same(seed: int, has_retractions: bool) -> None:
    pair, answers = Pair(seed, has_retractions), []
    for _ in range(300):
        if pair.random.random() < 0.6:
            answers.append(pair.has_room())
            assert pair.add() == answers[-1]
        else:
            pair.disturb()
            pair.deliver()
    assert min(answers.count(True), answers.count(False)) > 30


@pytest.mark.parametrize("has_retractions", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_with_news_under_way_a_call_that_is_let_in_is_taken_whole(seed: int, has_retractions: bool) -> None:
    pair, num_calls = Pair(seed, has_retractions), 0
    for _ in range(300):
        size = pair.random.randrange(1, LIMIT + ROWS + 1)
        if pair.has_room(size):
            num_calls += 1
            assert sum(pair.add() for _ in range(size)) == size
        pair.disturb()
        if pair.random.random() < 0.3:
            pair.deliver()
    assert num_calls > 30
