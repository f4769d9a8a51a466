"""In which order evictable leaves go. Kept as they change, never found by walking the tree.

Each change of a leaf puts a new entry into its queue, and only the entry that carries the node's current ticket counts. So any policy
works, also one whose priority may fall. Most leaves come in order (what was used last goes last), into a run that costs the same at any
length; the others go into a heap, O(log n).

    EvictionOrder    the policy's queue(s), then the queue of pinned leaves: those go last, the one that expires first before the others
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from radixserve.core import IntArray, Namespace
from radixserve.tree.node import TreeNode

Priority = float | tuple[float, ...]
EvictionPolicy = Callable[[TreeNode], Priority]  # the smallest goes first
Entry = tuple[Priority, int, TreeNode]  # with a ticket, which no two entries share


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
        self._run: deque[Entry] = deque()  # sorted
        self._heap: list[Entry] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[TreeNode]:
        return (entry[2] for entry in chain(self._run, self._heap) if _is_live(entry))

    def put(self, node: TreeNode, priority: Priority, ticket: int) -> None:
        """Add a node that is in no queue. Tickets rise, and no two puts of one tree have the same."""
        node.order_queue, node.order_ticket = self, ticket
        self._num_live += 1
        run, heap, entry = self._run, self._heap, (priority, ticket, node)
        if not run or run[-1] < entry:
            run.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(run) + len(heap) > 2 * self._num_live + 64:
            self._run = deque(filter(_is_live, run))
            self._heap = list(filter(_is_live, heap))
            heapq.heapify(self._heap)

    def remove(self, node: TreeNode) -> None:
        node.order_queue, node.order_ticket = None, 0
        self._num_live -= 1

    def head(self) -> Entry | None:
        """The smallest entry; it stays."""
        run, heap = self._run, self._heap
        while run and not _is_live(run[0]):
            run.popleft()
        while heap and not _is_live(heap[0]):
            heapq.heappop(heap)
        if run and heap:
            return min(run[0], heap[0])
        return run[0] if run else heap[0] if heap else None

    def clear(self) -> None:
        for node in self:
            node.order_queue, node.order_ticket = None, 0
        self._run.clear()
        self._heap.clear()
        self._num_live = 0


def _is_live(entry: Entry) -> bool:
    return entry[2].order_ticket == entry[1]


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

    def _next(self) -> Entry | None:
        return self._queue.head()


EVICTION_POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "lfu": lfu, "slru": slru, "fifo": fifo, "priority": priority}
