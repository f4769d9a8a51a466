"""The adaptive policy: lru, or lru behind a probation, whichever would have hit more of late. A duel on block ids decides.

    lru          one order for all
    probation    what was seen once goes before all that was seen again, be it as a ghost: one-off prompts pass through, conversations stay

Both orders are kept at once, as two queues by last access, so that a change of mind costs nothing and moves no node.
"""

from collections import OrderedDict
from zlib import crc32

from radixserve.core import IntArray, Namespace
from radixserve.tree.eviction import EVICTION_POLICIES, Entry, EvictionOrder, LeafQueue, lru
from radixserve.tree.key import TOKEN_BYTES
from radixserve.tree.node import TreeNode

GHOST_FACTOR = 4  # blocks remembered as seen, per block of the cache; the tree keeps ghosts of as many tokens
MAX_DUEL_BLOCKS = 2048  # larger caches are judged by a sample of the blocks, in a cache that is smaller by the same factor
MIN_BLOCK_TOKENS = 64
MARGIN = 0.05  # of the hits of the one that is followed, by which the other must lead to take over
DOUBT = 3.0  # and by so many standard deviations of the lead
MEMORY = 16  # half of the past is forgotten when the cache was turned over so many times: few requests turn a small one over
ADAPTIVE = "adaptive"


def make_order(policy: str, num_tokens: int, page_size: int) -> EvictionOrder:
    """The order of eviction by name, for a pool of num_tokens."""
    return AdaptiveOrder(num_tokens, page_size) if policy == ADAPTIVE else EvictionOrder(EVICTION_POLICIES[policy])


class AdaptiveOrder(EvictionOrder):
    """`num_tokens` is the size of the pool."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(lru)
        self._block_bytes = max(page_size, MIN_BLOCK_TOKENS - MIN_BLOCK_TOKENS % page_size) * TOKEN_BYTES
        num_blocks = max(1, num_tokens * TOKEN_BYTES // self._block_bytes)
        self._sample = max(1, num_blocks // MAX_DUEL_BLOCKS)
        self.duel = Duel(max(1, num_blocks // self._sample))
        self._probation = LeafQueue()
        self._queues = (self._probation, self._queue, self._pinned)

    def observe(self, namespace: Namespace, token_ids: IntArray, num_tokens: int) -> None:
        tokens, size = token_ids[:num_tokens].tobytes(), self._block_bytes
        # a checksum will do, and is the same in every process: a collision costs a wrong count, never a wrong page
        block_id, sampled = crc32("\0".join(namespace).encode()), []
        for start in range(0, len(tokens) - size + 1, size):
            block_id = crc32(tokens[start : start + size], block_id)
            if block_id % self._sample == 0:
                sampled.append(block_id)
        self.duel.observe(sampled)

    def _queue_of(self, node: TreeNode) -> LeafQueue:
        return self._queue if node.hits else self._probation

    def _next(self) -> Entry | None:
        fresh, proven = self._probation.head(), self._queue.head()
        if fresh is None or proven is None or self.duel.is_probation_better:
            return fresh or proven
        return min(fresh, proven, key=lambda entry: entry[:2])


class Duel:
    """Replays the requests through both candidates at once, as caches of ids alone. A block's id stands for all that leads to it.

    A request is stamped from its end, so that no block goes before those below it, and a block that is there is a hit: so are all above it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._fresh: OrderedDict[int, None] = OrderedDict()
        self._proven: OrderedDict[int, None] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._decay = 0.5 ** (1 / (MEMORY * num_blocks))  # per block
        self.lru_score = 0.0
        self.probation_score = 0.0
        self._variance = 0.0  # of the lead of one over the other
        self.is_probation_better = False

    def observe(self, block_ids: list[int]) -> None:
        """One request's blocks, from the root on."""
        decay = self._decay ** len(block_ids)
        lru_hits, probation_hits = self._access_lru(block_ids), self._access_probation(block_ids)
        self.lru_score = self.lru_score * decay + lru_hits
        self.probation_score = self.probation_score * decay + probation_hits
        self._variance = self._variance * decay**2 + (probation_hits - lru_hits) ** 2
        self._judge()

    def _judge(self) -> None:
        """A request's blocks are hit or missed together, so evidence is counted in requests: a few that differ by much prove nothing."""
        followed, other = self.lru_score, self.probation_score
        if self.is_probation_better:
            followed, other = other, followed
        if other - followed > MARGIN * followed + DOUBT * self._variance**0.5:
            self.is_probation_better = not self.is_probation_better

    def _access_lru(self, block_ids: list[int]) -> int:
        cache = self._lru
        num_hits = 0
        for block_id in block_ids:
            if block_id in cache:
                num_hits += 1
                del cache[block_id]
        while cache and len(cache) + len(block_ids) > self._num_blocks:
            cache.popitem(last=False)
        for block_id in reversed(block_ids):
            cache[block_id] = None
        return num_hits

    def _access_probation(self, block_ids: list[int]) -> int:
        fresh, proven, seen = self._fresh, self._proven, self._seen
        num_hits, again = 0, set()
        for block_id in block_ids:
            if block_id in seen:
                again.add(block_id)
                del seen[block_id]
            for queue in (fresh, proven):
                if block_id in queue:
                    num_hits += 1
                    del queue[block_id]
        while (fresh or proven) and len(fresh) + len(proven) + len(block_ids) > self._num_blocks:
            (fresh or proven).popitem(last=False)
        for block_id in reversed(block_ids):
            (proven if block_id in again else fresh)[block_id] = None
            seen[block_id] = None
        while len(seen) > (GHOST_FACTOR + 1) * self._num_blocks:
            seen.popitem(last=False)
        return num_hits
