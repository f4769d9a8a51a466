"""A Hypothesis state machine drives the tree, and a naive dictionary of token tuples says what is right, to the page id.

The naive cache scans all its pages for the next one to evict, under every policy and with pins.
"""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixserve.core import Namespace
from radixserve.tree.account import check_pages, check_tree
from radixserve.tree.adaptive import make_order
from radixserve.tree.key import TreeKey
from radixserve.tree.node import TreeNode
from radixserve.tree.page_pool import PagePool
from radixserve.tree.radix_tree import RadixTree
from tests.pure.helpers import ints, layered_key
from tests.support.examples import examples

NAMESPACES = [Namespace(), Namespace(cache_salt="x")]
NUM_PAGES = 40

Path = tuple[tuple[Namespace, tuple[int, ...]], ...]  # one (namespace, tokens of the page) per page


@dataclass
class Facts:
    """What is known of a page; hits outlive the page where there are ghosts."""

    last_access: int = 0
    created_at: int = 0
    hits: int = 0
    priority: int = 0
    pinned_until: int = 0


POLICIES = {
    "lru": lambda facts: facts.last_access,
    "lfu": lambda facts: (facts.hits, facts.last_access),
    "slru": lambda facts: (facts.hits > 0, facts.last_access),
    "fifo": lambda facts: facts.created_at,
    "priority": lambda facts: (facts.priority, facts.last_access),
    "adaptive": lambda facts: facts.last_access,
    "adaptive, probation": lambda facts: (facts.hits > 0, facts.last_access),
}


class NaiveCache:
    """Every cached page under its whole path. Pinned pages last, leaves first, then by the policy."""

    def __init__(self, policy: str, remembers: bool) -> None:
        self.policy = POLICIES[policy]
        self.remembers = remembers
        self.pages: dict[Path, int] = {}
        self.facts: dict[Path, Facts] = {}
        self.locks: list[Path] = []

    def match(self, path: Path) -> list[int]:
        found = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.pages:
                break
            found.append(self.pages[path[:end]])
        return found

    def add(self, path: Path, page: int, now: int, priority: int) -> Facts:
        """A page becomes cached, perhaps again."""
        self.pages[path] = page
        before = self.facts.get(path) if self.remembers else None
        self.facts[path] = Facts(now, now, before.hits + 1 if before else 0, priority)
        return self.facts[path]

    def use(self, path: Path, num_pages: int, now: int, priority: int) -> None:
        """The first num_pages pages are found again."""
        for end in range(1, num_pages + 1):
            facts = self.facts[path[:end]]
            facts.last_access, facts.hits, facts.priority = now, facts.hits + 1, max(facts.priority, priority)

    def touch(self, path: Path, now: int) -> None:
        for end in range(1, len(path) + 1):
            self.facts[path[:end]].last_access = now

    def expire(self, now: int) -> None:
        for facts in self.facts.values():
            facts.pinned_until = facts.pinned_until if facts.pinned_until > now else 0

    def num_pinned(self) -> int:
        return sum(self.facts[path].pinned_until > 0 for path in self.pages)

    def order(self, path: Path) -> tuple[int, object]:
        facts = self.facts[path]
        return facts.pinned_until, 0 if facts.pinned_until else self.policy(facts)

    def is_locked(self, path: Path) -> bool:
        return any(lock[: len(path)] == path for lock in self.locks)

    def evictable(self) -> list[Path]:
        return [path for path in self.pages if not self.is_locked(path)]

    def evict(self, num_pages: int, now: int) -> set[int]:
        self.expire(now)
        freed: set[int] = set()
        while len(freed) < num_pages:
            inner = {path[:-1] for path in self.pages}
            leaves = [path for path in self.evictable() if path not in inner]
            if not leaves:
                break
            first = min(leaves, key=self.order)
            freed.add(self.pages.pop(first))
            self.facts[first].pinned_until = 0
        return freed


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        ghosts=st.sampled_from([0, 8, 10**6]),
        policy=st.sampled_from([*POLICIES]),
        budget=st.integers(0, 40),
    )
    def start(self, page_size: int, ghosts: int, policy: str, budget: int) -> None:
        if ghosts == 8 and policy not in ("lru", "fifo", "priority", "adaptive"):
            ghosts = 0  # which hits are remembered is another story
        self.page_size = page_size
        order = make_order(policy.split(",")[0], NUM_PAGES * page_size, page_size)
        if policy == "adaptive, probation":
            order.duel.is_probation_better = True
        self.tree = RadixTree(page_size, order, ghosts, max_pinned_pages=budget)
        self.pool = PagePool(NUM_PAGES)
        self.naive = NaiveCache(policy, remembers=ghosts > 8)
        self.handles: list[tuple[TreeNode, Path]] = []
        self.now = 0

    def _key(self, runs: list[tuple[int, list[int]]]) -> tuple[TreeKey, Path]:
        """The key, and its whole pages; a run that ends inside a page ends the path."""
        segments: list[tuple[Namespace, list[int]]] = []
        for which, tokens in runs:
            if segments and segments[-1][0] == NAMESPACES[which]:
                segments[-1] = (NAMESPACES[which], segments[-1][1] + tokens)
            elif tokens:
                segments.append((NAMESPACES[which], tokens))
        path: list[tuple[Namespace, tuple[int, ...]]] = []
        for namespace, tokens in segments:
            whole = len(tokens) - len(tokens) % self.page_size
            path += [(namespace, tuple(tokens[at : at + self.page_size])) for at in range(0, whole, self.page_size)]
            if whole < len(tokens):
                break
        return layered_key(*segments), tuple(path)

    runs = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=12)), min_size=1, max_size=2)

    @rule(runs=runs, priority=st.integers(0, 2))
    def insert(self, runs: list[tuple[int, list[int]]], priority: int) -> None:
        key, path = self._key(runs)
        if len(path) > self.pool.num_free:
            return
        self.now += 1
        own = self.pool.allocate(len(path))
        existing = list(self.tree.insert(key, own, self.now, priority=priority).existing_pages)
        assert existing == self.naive.match(path)
        self.pool.free(own[: len(existing)])
        self.naive.use(path, len(existing), self.now, priority)
        for end in range(len(existing) + 1, len(path) + 1):
            self.naive.add(path[:end], own[end - 1], self.now, priority)

    @rule(runs=runs, cap=st.integers(0, 30))
    def match(self, runs: list[tuple[int, list[int]]], cap: int) -> None:
        key, path = self._key(runs)
        found = self.tree.match(key, cap)
        expected = self.naive.match(path[: cap // self.page_size])
        assert list(found.pages) == expected
        assert found.length == len(expected) * self.page_size
        assert found.num_unlocked_pages == sum(not self.naive.is_locked(path[:end]) for end in range(1, len(expected) + 1))

    @rule(runs=runs, priority=st.integers(0, 2))
    def lock(self, runs: list[tuple[int, list[int]]], priority: int) -> None:
        key, path = self._key(runs)
        self.now += 1
        found = self.tree.match(key)
        path = path[: len(found.pages)]
        self.handles.append((self.tree.lock(found, self.now, priority), path))
        self.naive.locks.append(path)
        self.naive.use(path, len(path), self.now, priority)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, path = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.now += 1
        self.tree.unlock(node, self.now)
        self.naive.locks.remove(path)
        self.naive.touch(path, self.now)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), runs=runs, priority=st.integers(0, 2))
    def extend(self, data: st.DataObject, runs: list[tuple[int, list[int]]], priority: int) -> None:
        """What a running request does with its next chunk: insert below its own lock, and take the lock along."""
        key, tail = self._key(runs)
        if len(tail) > self.pool.num_free:
            return
        which = data.draw(st.integers(0, len(self.handles) - 1))
        node, path = self.handles[which]
        self.now += 1
        own = self.pool.allocate(len(tail))
        result = self.tree.insert(key, own, self.now, at=node, priority=priority)
        existing = list(result.existing_pages)
        longer = path + tail
        assert existing == self.naive.match(longer)[len(path) :]
        self.pool.free(own[: len(existing)])
        for end in range(len(path) + 1, len(path) + len(existing) + 1):
            facts = self.naive.facts[longer[:end]]
            facts.last_access, facts.hits, facts.priority = self.now, facts.hits + 1, max(facts.priority, priority)
        is_longer = result.node is node and len(tail) > 0  # the edge has grown: what is new inherits, what was there gets the priority
        for end in range(len(existing) + 1, len(tail) + 1):
            facts = self.naive.add(longer[: len(path) + end], own[end - 1], self.now, priority)
            if is_longer:
                facts.created_at, facts.hits = self.naive.facts[path].created_at, self.naive.facts[path].hits
        if is_longer:
            self.set_priority_of_edge(node, longer)
        self.tree.move_lock(node, result.node)
        self.naive.locks.remove(path)
        self.naive.locks.append(longer)
        self.handles[which] = (result.node, longer)

    @rule(num_pages=st.integers(1, 12))
    def evict(self, num_pages: int) -> None:
        self.now += 1
        freed = self.tree.evict(num_pages, self.now)
        assert len(set(freed)) == len(freed)
        assert set(freed) == self.naive.evict(num_pages, self.now)
        self.pool.free(freed)

    @rule(runs=runs, ttl=st.integers(1, 12))
    def pin(self, runs: list[tuple[int, list[int]]], ttl: int) -> None:
        key, path = self._key(runs)
        self.now += 1
        result = self.tree.pin(key, self.now + ttl, self.now)
        self.naive.expire(self.now)
        num_kept = 0
        for end in range(1, len(self.naive.match(path)) + 1):
            facts = self.naive.facts[path[:end]]
            if not facts.pinned_until and self.naive.num_pinned() >= self.tree.pins.max_pages:
                break
            facts.pinned_until = max(facts.pinned_until, self.now + ttl)
            num_kept = end
        assert result == (num_kept * self.page_size, self.now + ttl)

    def set_priority_of_edge(self, node: TreeNode, path: Path) -> None:
        for end in range(len(path) - node.num_pages + 1, len(path) + 1):
            self.naive.facts[path[:end]].priority = node.priority

    @precondition(lambda self: not self.handles)
    @rule()
    def flush(self) -> None:
        self.pool.free(self.tree.clear(self.now))
        self.naive.pages.clear()
        self.naive.facts.clear()

    @invariant()
    def account(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        check_pages(self.pool, self.tree, [ints()])
        assert self.tree.num_evictable_pages == len(self.naive.evictable())
        self.naive.expire(self.now)
        self.tree.expire_pins(self.now)
        assert self.tree.pins.num_pages == self.naive.num_pinned()
        assert self.tree.num_evictable_pages + self.tree.num_locked_pages == len(self.naive.pages)


TreeMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTreeMachine = TreeMachine.TestCase
