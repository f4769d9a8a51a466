"""In which order evictable leaves go. Kept as they change, never found by walking the tree.

A queue is a heap with tickets: each change of a leaf pushes a new entry, and only the entry that carries the node's current ticket counts.
So any policy works, also one whose priority may fall, and every operation is O(log n).

    EvictionOrder    the policy's queue(s), then the queue of pinned leaves: those go last, the one that expires first before the others
"""

import heapq
from collections.abc import Callable, Iterator

from radixserve.core import IntArray, Namespace
from radixserve.tree.node import TreeNode

Priority = float | tuple[float, ...]
EvictionPolicy = Callable[[TreeNode], Priority]  # the smallest goes first


def lru(node: TreeNode) -> Priority:
    """Least recently used first."""
    return node.last_access


def lfu(node: TreeNode) -> Priority:
    """Least often found again first; equal ones least recently used first."""
    return (node.hits, node.last_access)


def slru(node: TreeNode) -> Priority:
    """Segmented lru: what was never found again goes before what was."""
    return (node.hits > 0, node.last_access)


def fifo(node: TreeNode) -> Priority:
    """Oldest first, used or not."""
    return node.created_at


def priority(node: TreeNode) -> Priority:
    """Lowest priority of the requests that used it first (the highest of them counts); equal ones least recently used first."""
    return (node.priority, node.last_access)


class LeafQueue:
    """A priority queue of nodes, each of which is in at most one queue of its tree. Equal priorities in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, int, TreeNode]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[TreeNode]:
        return (node for _, ticket, node in self._heap if node.order_ticket == ticket)

    def put(self, node: TreeNode, priority: Priority, ticket: int) -> None:
        """Add a node that is in no queue. Tickets rise, and no two puts of one tree have the same."""
        node.order_queue, node.order_ticket = self, ticket
        self._num_live += 1
        heapq.heappush(self._heap, (priority, ticket, node))
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].order_ticket == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, node: TreeNode) -> None:
        node.order_queue, node.order_ticket = None, 0
        self._num_live -= 1

    def head(self) -> tuple[Priority, int, TreeNode] | None:
        """The smallest entry; it stays."""
        heap = self._heap
        while heap:
            if heap[0][2].order_ticket == heap[0][1]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def clear(self) -> None:
        for node in self:
            node.order_queue, node.order_ticket = None, 0
        self._heap.clear()
        self._num_live = 0


class EvictionOrder:
    """The evictable leaves of one tree."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._pinned = LeafQueue()
        self._queue = LeafQueue()
        self._queues: tuple[LeafQueue, ...] = (self._queue, self._pinned)
        self._last_ticket = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[TreeNode]:
        return (node for queue in self._queues for node in queue)

    def put(self, node: TreeNode) -> None:
        """Add the leaf, or move it to where it belongs now."""
        if node.order_queue is not None:
            node.order_queue.remove(node)
        self._last_ticket += 1
        if node.pinned_until:
            self._pinned.put(node, node.pinned_until, self._last_ticket)
        else:
            self._queue_of(node).put(node, self._policy(node), self._last_ticket)

    def discard(self, node: TreeNode) -> None:
        if node.order_queue is not None:
            node.order_queue.remove(node)

    def pop(self) -> TreeNode | None:
        """Take out the leaf to evict next; None if there is none."""
        head = self._next() or self._pinned.head()
        if head is None:
            return None
        self.discard(head[2])
        return head[2]

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()

    def observe(self, namespace: Namespace, token_ids: IntArray, num_tokens: int) -> None:
        """A request has ended that used the first num_tokens of these; for policies that learn."""

    def _queue_of(self, node: TreeNode) -> LeafQueue:
        return self._queue

    def _next(self) -> tuple[Priority, int, TreeNode] | None:
        return self._queue.head()


EVICTION_POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "lfu": lfu, "slru": slru, "fifo": fifo, "priority": priority}
