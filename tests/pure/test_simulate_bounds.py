"""The simulator's bounds against brute force."""

import random
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest

from bench.simulator.bounds import best_hits, one_after_the_other
from radixserve.core import IntArray


class Paths:
    """Requests as paths of blocks, for bounds alone; `caps` leading blocks can be re-used."""

    def __init__(self, paths: Sequence[Sequence[int]], caps: Sequence[int]) -> None:
        self._paths = [array("i", path) for path in paths]
        self._caps = caps

    def whole_blocks(self, number: int) -> IntArray:
        return self._paths[number]

    def num_reusable(self, number: int) -> int:
        return self._caps[number]


def random_paths(rng: random.Random, num_requests: int) -> Paths:
    """Paths of a small trie: the id of a block says all that is before it."""
    ids: dict[tuple[int, ...], int] = {}
    paths, caps = [], []
    for _ in range(num_requests):
        words = tuple(rng.randrange(2) for _ in range(rng.randint(1, 3)))
        paths.append([ids.setdefault(words[: depth + 1], len(ids)) for depth in range(len(words))])
        caps.append(len(words) - (rng.random() < 0.3))
    return Paths(paths, caps)


def random_events(rng: random.Random, num_requests: int) -> list[int]:
    """Up to three requests at once, ending in any order."""
    events: list[int] = []
    running: list[int] = []
    for number in range(num_requests):
        while running and (len(running) == 3 or rng.random() < 0.6):
            events.append(-running.pop(rng.randrange(len(running))) - 1)
        running.append(number)
        events.append(number + 1)
    return events + [-number - 1 for number in running]


def brute_force(blocks: Paths, events: Sequence[int], capacity: int) -> int:
    """Try every choice of what to keep, at every end of a request."""

    @cache
    def best(place: int, kept: frozenset[int], in_use: tuple[int, ...]) -> int:
        if place == len(events):
            return 0
        number = abs(events[place]) - 1
        whole = list(blocks.whole_blocks(number))
        if events[place] > 0:
            hits = 0
            while hits < blocks.num_reusable(number) and (whole[hits] in kept or whole[hits] in in_use):
                hits += 1
            return hits + best(place + 1, kept - set(whole), tuple(sorted((*in_use, *whole))))
        left = list(in_use)
        for block in whole:
            left.remove(block)
        offered = sorted(kept | {block for block in whole if block not in left})
        choices = (choice for size in range(min(capacity, len(offered)) + 1) for choice in combinations(offered, size))
        return max(best(place + 1, frozenset(choice), tuple(left)) for choice in choices)

    return best(0, frozenset(), ())


@pytest.mark.parametrize("seed", range(120))
def test_the_bound_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_paths(rng, 7)
    events = one_after_the_other(7) if seed % 2 else random_events(rng, 7)
    for capacity in (1, 2, 4):
        assert best_hits(blocks, events, capacity) == brute_force(blocks, events, capacity)


def test_a_cache_without_end_hits_whatever_was_there_before() -> None:
    rng = random.Random(5)
    blocks = random_paths(rng, 200)
    seen: set[int] = set()
    hits = 0
    for number in range(200):
        whole = blocks.whole_blocks(number)
        hits += sum(block in seen for block in whole[: blocks.num_reusable(number)])
        seen |= set(whole)
    assert best_hits(blocks, one_after_the_other(200), None) == hits > 0
