"""A Hypothesis state machine drives the tree, and a naive dictionary of token tuples says what is right, to the page id."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixserve.core import Namespace
from radixserve.tree.account import check_pages, check_tree
from radixserve.tree.key import TreeKey
from radixserve.tree.node import TreeNode
from radixserve.tree.page_pool import PagePool
from radixserve.tree.radix_tree import RadixTree
from tests.pure.helpers import ints, layered_key

NAMESPACES = [Namespace(), Namespace(cache_salt="x")]
NUM_PAGES = 40

Path = tuple[tuple[Namespace, tuple[int, ...]], ...]  # one (namespace, tokens of the page) per page


class NaiveCache:
    """Every cached page under its whole path. Leaves first, oldest stamp first."""

    def __init__(self) -> None:
        self.pages: dict[Path, int] = {}
        self.stamps: dict[Path, int] = {}
        self.locks: list[Path] = []

    def match(self, path: Path) -> list[int]:
        found = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.pages:
                break
            found.append(self.pages[path[:end]])
        return found

    def touch(self, path: Path, now: int) -> None:
        for end in range(1, len(path) + 1):
            self.stamps[path[:end]] = now

    def is_locked(self, path: Path) -> bool:
        return any(lock[: len(path)] == path for lock in self.locks)

    def evictable(self) -> list[Path]:
        return [path for path in self.pages if not self.is_locked(path)]

    def evict(self, num_pages: int) -> set[int]:
        freed: set[int] = set()
        while len(freed) < num_pages:
            inner = {path[:-1] for path in self.pages}
            leaves = [path for path in self.evictable() if path not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=lambda path: self.stamps[path])
            freed.add(self.pages.pop(oldest))
        return freed


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 4]), ghosts=st.sampled_from([0, 8, 1000]))
    def start(self, page_size: int, ghosts: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size, max_ghost_tokens=ghosts)
        self.pool = PagePool(NUM_PAGES)
        self.naive = NaiveCache()
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

    @rule(runs=runs)
    def insert(self, runs: list[tuple[int, list[int]]]) -> None:
        key, path = self._key(runs)
        if len(path) > self.pool.num_free:
            return
        self.now += 1
        own = self.pool.allocate(len(path))
        existing = list(self.tree.insert(key, own, self.now).existing_pages)
        assert existing == self.naive.match(path)
        self.pool.free(own[: len(existing)])
        for end in range(len(existing) + 1, len(path) + 1):
            self.naive.pages[path[:end]] = own[end - 1]
        self.naive.touch(path, self.now)

    @rule(runs=runs, cap=st.integers(0, 30))
    def match(self, runs: list[tuple[int, list[int]]], cap: int) -> None:
        key, path = self._key(runs)
        found = self.tree.match(key, cap)
        expected = self.naive.match(path[: cap // self.page_size])
        assert list(found.pages) == expected
        assert found.length == len(expected) * self.page_size
        assert found.num_unlocked_pages == sum(not self.naive.is_locked(path[:end]) for end in range(1, len(expected) + 1))

    @rule(runs=runs)
    def lock(self, runs: list[tuple[int, list[int]]]) -> None:
        key, path = self._key(runs)
        self.now += 1
        found = self.tree.match(key)
        path = path[: len(found.pages)]
        self.handles.append((self.tree.lock(found, self.now), path))
        self.naive.locks.append(path)
        self.naive.touch(path, self.now)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, path = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.now += 1
        self.tree.unlock(node, self.now)
        self.naive.locks.remove(path)
        self.naive.touch(path, self.now)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), runs=runs)
    def extend(self, data: st.DataObject, runs: list[tuple[int, list[int]]]) -> None:
        """What a running request does with its next chunk: insert below its own lock, and take the lock along."""
        key, tail = self._key(runs)
        if len(tail) > self.pool.num_free:
            return
        which = data.draw(st.integers(0, len(self.handles) - 1))
        node, path = self.handles[which]
        self.now += 1
        own = self.pool.allocate(len(tail))
        result = self.tree.insert(key, own, self.now, at=node)
        existing = list(result.existing_pages)
        longer = path + tail
        assert existing == self.naive.match(longer)[len(path) :]
        self.pool.free(own[: len(existing)])
        for end in range(len(existing) + 1, len(tail) + 1):
            self.naive.pages[longer[: len(path) + end]] = own[end - 1]
        for end in range(len(path) + 1, len(longer) + 1):
            self.naive.stamps[longer[:end]] = self.now
        self.tree.move_lock(node, result.node)
        self.naive.locks.remove(path)
        self.naive.locks.append(longer)
        self.handles[which] = (result.node, longer)

    @rule(num_pages=st.integers(1, 12))
    def evict(self, num_pages: int) -> None:
        self.now += 1
        freed = self.tree.evict(num_pages, self.now)
        assert len(set(freed)) == len(freed)
        assert set(freed) == self.naive.evict(num_pages)
        self.pool.free(freed)

    @precondition(lambda self: not self.handles)
    @rule()
    def flush(self) -> None:
        self.pool.free(self.tree.clear(self.now))
        self.naive.pages.clear()

    @invariant()
    def account(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        check_pages(self.pool, self.tree, [ints()])
        assert self.tree.num_evictable_pages == len(self.naive.evictable())
        assert self.tree.num_evictable_pages + self.tree.num_locked_pages == len(self.naive.pages)


TreeMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTreeMachine = TreeMachine.TestCase
