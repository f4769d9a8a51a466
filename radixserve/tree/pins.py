"""Pins: prefixes that are kept for a time, within a budget of pages. Soft: a pinned page is evictable, it only goes after all others.

A pinned node's ancestors are pinned at least as long, since they are of no less use. An expiry is found through a heap, not by a walk.
"""

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixserve.tree.node import TreeNode


class PinResult(NamedTuple):
    """What a pin did."""

    num_tokens: int  # of the prompt's leading tokens, kept from now on; fewer than were asked for: not cached, or beyond the budget
    until: float  # at least so long; those that were pinned for longer before stay so


class PinBook:
    """Which nodes are pinned until when. Pages are counted; ghosts are never pinned."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_pages = 0
        self._num_nodes = 0
        self._num_pushed = 0
        self._heap: list[tuple[float, int, TreeNode]] = []

    def __iter__(self) -> Iterator[TreeNode]:
        """Each pinned node once."""
        return iter({node.node_id: node for until, _, node in self._heap if node.pinned_until == until}.values())

    def affordable(self, path: Iterable[TreeNode], num_pages: int) -> int:
        """How many of the first num_pages pages along a path may be pinned; what is pinned already costs nothing."""
        room, num_walked = max(0, self.max_pages - self.num_pages), 0
        for node in path:
            held = min(node.num_pages, num_pages - num_walked)
            if not node.pinned_until and held > room:
                return num_walked + room
            room -= 0 if node.pinned_until else held
            num_walked += held
        return num_walked

    def add(self, node: TreeNode, until: float) -> None:
        """Pin a node with pages, or pin it for longer."""
        if until <= node.pinned_until:
            return
        if not node.pinned_until:
            self.num_pages += node.num_pages
            self._num_nodes += 1
        node.pinned_until = until
        self._push(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` was cut off `lower`, with some of its pages."""
        if lower.pinned_until:
            upper.pinned_until = lower.pinned_until
            self._num_nodes += 1
            self._push(upper)

    def shrink(self, node: TreeNode, num_pages: int) -> None:
        """A node is about to lose so many pages; its pin goes with the last one."""
        if node.pinned_until:
            self.num_pages -= num_pages
            if num_pages == node.num_pages:
                node.pinned_until = 0.0
                self._num_nodes -= 1

    def pop_expired(self, now: float) -> list[TreeNode]:
        """Unpin what has expired, and return it."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            until, _, node = heapq.heappop(self._heap)
            if node.pinned_until == until:
                self.shrink(node, node.num_pages)
                expired.append(node)
        return expired

    def clear(self) -> None:
        self._heap.clear()
        self.num_pages = self._num_nodes = 0

    def _push(self, node: TreeNode) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.pinned_until, self._num_pushed, node))
        if len(self._heap) > 2 * self._num_nodes + 64:
            self._heap = [(node.pinned_until, number, node) for number, node in enumerate(self)]
            heapq.heapify(self._heap)
