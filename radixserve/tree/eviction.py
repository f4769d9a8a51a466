"""In which order evictable leaves go. Kept as they change, never found by walking the tree.

A heap with tickets: each change of a leaf pushes a new entry, and only the entry that carries the node's current ticket counts. So any
policy works, also one whose priority may fall, and every operation is O(log n).
"""

import heapq
from collections.abc import Callable, Iterator

from radixserve.tree.node import TreeNode

Priority = tuple[float, ...]
EvictionPolicy = Callable[[TreeNode], Priority]  # the smallest goes first


def lru(node: TreeNode) -> Priority:
    """Least recently used first."""
    return (node.last_access,)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {"lru": lru}


class EvictionOrder:
    """The evictable leaves, smallest priority first; equal priorities in order of arrival."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Priority, int, TreeNode]] = []
        self._last_ticket = 0
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[TreeNode]:
        return (node for _, ticket, node in self._heap if node.order_ticket == ticket)

    def put(self, node: TreeNode) -> None:
        """Add the leaf, or move it to where its priority is now."""
        if node.order_ticket == 0:
            self._num_live += 1
        self._last_ticket += 1
        node.order_ticket = self._last_ticket
        heapq.heappush(self._heap, (self._policy(node), self._last_ticket, node))
        if len(self._heap) > 2 * self._num_live + 64:
            self._compact()

    def discard(self, node: TreeNode) -> None:
        if node.order_ticket != 0:
            node.order_ticket = 0
            self._num_live -= 1

    def pop(self) -> TreeNode | None:
        """Take out the leaf to evict next; None if there is none."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if node.order_ticket == ticket:
                self.discard(node)
                return node
        return None

    def clear(self) -> None:
        for node in self:
            node.order_ticket = 0
        self._heap.clear()
        self._num_live = 0

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].order_ticket == entry[1]]
        heapq.heapify(self._heap)
