"""Which replica gets a request. A router sees a prompt's blocks and the number of requests in flight by replica, never a tree."""

import hashlib
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

RING_POINTS = 64  # of each replica on the hash ring
AFFINITY_BLOCKS = 2  # a prompt's place on the ring is that of its so many-th block: the first may be everybody's
MATCH_THRESHOLD = 0.3  # cache-aware: smaller matches are not followed; these three are the defaults of SGLang's command line
BALANCE_ABS = 64  # cache-aware: loads count as uneven if they differ by more than this
BALANCE_REL = 1.5  # and by more than this factor


class Router(Protocol):
    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        """The replica for a prompt. `loads`: requests in flight by replica."""


class RoundRobin:
    def __init__(self, num_replicas: int, capacity: int, seed: int) -> None:
        self._next = -1
        self._num_replicas = num_replicas

    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        self._next = (self._next + 1) % self._num_replicas
        return self._next


class Random:
    def __init__(self, num_replicas: int, capacity: int, seed: int) -> None:
        self._rng = random.Random(f"router/{seed}")
        self._num_replicas = num_replicas

    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        return self._rng.randrange(self._num_replicas)


class LeastLoaded:
    """Fewest requests in flight; among equals the one chosen longest ago."""

    def __init__(self, num_replicas: int, capacity: int, seed: int) -> None:
        self._chosen_at = [-1] * num_replicas
        self._count = 0

    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        replica = min(range(len(loads)), key=lambda one: (loads[one], self._chosen_at[one]))
        self._chosen_at[replica] = self._count
        self._count += 1
        return replica


class ConsistentHash:
    """Equal beginnings to equal replicas, by a hash ring; loads are not looked at."""

    def __init__(self, num_replicas: int, capacity: int, seed: int) -> None:
        points = sorted((self._hash(f"{replica}/{point}"), replica) for replica in range(num_replicas) for point in range(RING_POINTS))
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    @staticmethod
    def _hash(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        block = blocks[min(len(blocks), AFFINITY_BLOCKS) - 1] if len(blocks) else -1
        return self._replicas[bisect(self._places, self._hash(str(block))) % len(self._places)]


class CacheAware:
    """As SGLang's router: where loads are uneven the least loaded replica; else who was last sent the longest equal beginning, if that is
    more than MATCH_THRESHOLD of the prompt; else who was sent the least. What was sent is remembered up to `capacity` blocks a replica.
    """

    def __init__(self, num_replicas: int, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._holders: dict[int, list[int]] = {}  # block -> replicas that were sent it, the latest last
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]  # by replica, longest ago first

    def choose(self, blocks: Sequence[int], loads: Sequence[int]) -> int:
        low, high = min(loads), max(loads)
        matched, holder = self._match(blocks)
        if high - low > BALANCE_ABS and high > low * BALANCE_REL:
            replica = loads.index(low)
        elif matched > MATCH_THRESHOLD * len(blocks):
            replica = holder
        else:
            replica = min(range(len(loads)), key=lambda one: (len(self._sent[one]), loads[one]))
        self._remember(blocks, replica)
        return replica

    def _match(self, blocks: Sequence[int]) -> tuple[int, int]:
        matched, holder = 0, -1
        for block in blocks:
            holders = self._holders.get(block)
            if not holders:
                break
            matched, holder = matched + 1, holders[-1]
        return matched, holder

    def _remember(self, blocks: Sequence[int], replica: int) -> None:
        sent = self._sent[replica]
        for block in reversed(blocks):  # ends are forgotten before beginnings
            if block in sent:
                sent.move_to_end(block)
                self._holders[block].remove(replica)
                self._holders[block].append(replica)
            else:
                sent[block] = None
                self._holders.setdefault(block, []).append(replica)
        while len(sent) > self._capacity:
            block, _ = sent.popitem(last=False)
            holders = self._holders[block]
            holders.remove(replica)
            if not holders:
                del self._holders[block]


ROUTERS: dict[str, Callable[[int, int, int], Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "consistent-hash": ConsistentHash,
    "cache-aware": CacheAware,
}


def make_router(name: str, num_replicas: int, capacity: int, seed: int) -> Router:
    """`capacity`: blocks of a replica's pool. ValueError for another name."""
    if name not in ROUTERS:
        raise ValueError(f"router: expected one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name](num_replicas, capacity, seed)
