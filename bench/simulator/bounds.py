"""What no eviction policy can beat: farthest next use with bypass (Belady), and a cache without end, on equal blocks.

An event is number + 1 where request `number` starts to run and reads its blocks, and -(number + 1) where it ends and has written them.
Between the two its blocks are in use and cost nothing, so the bound holds for requests that overlap as well; with one request after
the other it is the classical one. A block that the request could not have re-used (it must compute a token) does not count.

    block b   [in use by r1][ kept or not: takes one place ][in use by r2]        <- one choice, worth one hit if all blocks before b hit

Choosing the most such intervals with at most `capacity` at any time is optimal by throwing out the farthest end. A block's next use is
never later than its children's, so with ties broken deepest first no kept block ever lacks the ones before it: the tree costs nothing.
"""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from radixserve.core import IntArray

NEVER = 2**62


class Blocks(Protocol):
    """What a bound must know of requests; Load is one."""

    def whole_blocks(self, number: int) -> IntArray:
        """Ids of the blocks that it leaves behind, in order; equal ids have equal ids before them."""

    def num_reusable(self, number: int) -> int:
        """How many leading blocks it could have re-used."""


def best_hits(blocks: Blocks, events: Sequence[int], capacity: int | None) -> int:
    """Most blocks that can be re-used with `capacity` of them kept between uses (None: no limit)."""
    next_reads = _next_reads(blocks, events)
    kept: dict[int, int] = {}  # block -> event of its next use
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where `kept` says otherwise
    num_users: dict[int, int] = {}
    num_hits = 0
    for place, event in enumerate(events):
        number = abs(event) - 1
        whole = blocks.whole_blocks(number)
        if event > 0:
            num_hits += _num_leading(whole[: blocks.num_reusable(number)], kept, num_users)
            for block in whole:
                kept.pop(block, None)
                num_users[block] = num_users.get(block, 0) + 1
            continue
        for depth, (block, next_read) in enumerate(zip(whole, next_reads[place], strict=True)):
            num_users[block] -= 1
            if num_users[block] == 0:
                del num_users[block]
                if next_read < NEVER:
                    kept[block] = next_read
                    heappush(farthest, (-next_read, -depth, block))
        while capacity is not None and len(kept) > capacity:
            until, _, block = heappop(farthest)
            if kept.get(block) == -until:
                del kept[block]
    return num_hits


def _num_leading(blocks: IntArray, kept: dict[int, int], in_use: dict[int, int]) -> int:
    for count, block in enumerate(blocks):
        if block not in kept and block not in in_use:
            return count
    return len(blocks)


def _next_reads(blocks: Blocks, events: Sequence[int]) -> dict[int, "array[int]"]:
    """For each event that ends a request, by place: the place of the next read of each of its blocks that can be a hit.

    NEVER also where the next reader computes the block in any case: keeping it until then is of no use.
    """
    coming: dict[int, int] = {}
    found = {}
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        number = abs(event) - 1
        whole = blocks.whole_blocks(number)
        if event < 0:
            found[place] = array("q", [coming.get(block, NEVER) for block in whole])
        else:
            num_reusable = blocks.num_reusable(number)
            for depth, block in enumerate(whole):
                coming[block] = place if depth < num_reusable else NEVER
    return found


def one_after_the_other(num_requests: int) -> list[int]:
    """The events of requests that do not overlap, in order of arrival."""
    return [event for number in range(num_requests) for event in (number + 1, -number - 1)]
