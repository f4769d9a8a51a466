"""PrefixCache: the scheduler's only door to tree and pool. It decides which pages a request holds (page_path.py), and knows nothing of who
runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from radixserve.core import IntArray, Namespace, PageWrite
from radixserve.tree.account import check_pages, check_tree
from radixserve.tree.adaptive import ADAPTIVE, GHOST_FACTOR, make_order
from radixserve.tree.events import TreeEvent
from radixserve.tree.explain import MatchExplanation, explain
from radixserve.tree.key import TreeKey
from radixserve.tree.matching import Match, num_unlocked_by
from radixserve.tree.node import TreeNode
from radixserve.tree.page_path import PagePath, grow_all
from radixserve.tree.page_pool import PagePool
from radixserve.tree.pins import PinResult
from radixserve.tree.radix_tree import RadixTree
from radixserve.tree.watcher import TimedApart, TreeWatcher


class PrefixMatch(NamedTuple):
    """What a prompt would re-use now. Valid until the tree changes."""

    namespace: Namespace
    num_tokens: int
    num_unlocked_pages: int  # of the matched pages: so many stop being evictable once they are locked
    found: Match | None


class PageCache(Protocol):
    """The contract of PrefixCache and its plain twin DisabledCache. `now` is any clock that does not run backwards."""

    page_size: int
    is_shared: bool  # whether one request may re-use what another one computed
    seconds: float  # spent behind this door so far, less what the watcher took
    num_evicted_pages: int  # so far

    @property
    def growth(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_evictable_pages(self) -> int: ...
    @property
    def num_locked_pages(self) -> int: ...
    def match(self, namespace: Namespace, token_ids: IntArray, max_len: int) -> PrefixMatch: ...
    def lock(self, match: PrefixMatch, now: float, priority: int = 0) -> PagePath: ...
    def reserve(self, path: PagePath, num_tokens: int, now: float) -> PageWrite | None: ...
    def reserve_all(self, wanted: Sequence[tuple[PagePath, int]], now: float) -> list[PageWrite | None]: ...
    def commit(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_under_way: bool = ...) -> PageWrite | None: ...
    def drop_replaced(self, path: PagePath) -> None: ...
    def release(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_over: bool = True) -> None: ...
    def num_given_back(self, paths: Sequence[PagePath], match: PrefixMatch) -> Iterator[int]: ...
    def flush(self, now: float) -> None: ...
    def pin(self, namespace: Namespace, token_ids: IntArray, ttl_s: float, now: float) -> PinResult: ...
    def num_pinned_pages(self, now: float) -> int: ...
    def watch(self, watcher: TreeWatcher) -> TreeNode | None: ...
    def explain(self, namespace: Namespace, token_ids: IntArray) -> MatchExplanation | None: ...
    def check_account(self, paths: Iterable[PagePath]) -> None: ...


Method = TypeVar("Method", bound=Callable[..., Any])


def timed(method: Method) -> Method:
    """Add the time of a method to `seconds`. Timed methods do not call one another."""

    @wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        start = perf_counter()
        try:
            return method(self, *args)
        finally:
            self.seconds += perf_counter() - start

    return cast(Method, wrapper)


class PrefixCache:
    """A radix tree over a page pool."""

    is_shared = True

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        policy: str = "lru",
        on_event: Callable[[TreeEvent], None] | None = None,
        max_pinned_fraction: float = 0.0,
    ) -> None:
        self.page_size = page_size
        self.seconds = 0.0
        self.num_evicted_pages = 0
        self._pool = PagePool(num_pages, page_size)
        num_tokens = num_pages * page_size
        # as many tokens again as the pool holds: enough to tell "evicted" from "never seen" over one turnover of the pool
        self.tree = RadixTree(
            page_size,
            make_order(policy, num_tokens, page_size),
            max_ghost_tokens=num_tokens * (GHOST_FACTOR if policy == ADAPTIVE else 1),
            on_event=on_event,
            max_pinned_pages=int(num_pages * max_pinned_fraction),
        )

    @property
    def growth(self) -> int:
        """Changes whenever a match may have become longer."""
        return self.tree.growth

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable_pages(self) -> int:
        return self.tree.num_evictable_pages

    @property
    def num_locked_pages(self) -> int:
        return self.tree.num_locked_pages

    @timed
    def match(self, namespace: Namespace, token_ids: IntArray, max_len: int) -> PrefixMatch:
        """The longest cached prefix of at most max_len tokens, and less than all: the last token is computed anyway, for its logits."""
        found = self.tree.match(TreeKey.of(namespace, token_ids), min(max_len, len(token_ids) - 1))
        return PrefixMatch(namespace, found.length, found.num_unlocked_pages, found)

    @timed
    def lock(self, match: PrefixMatch, now: float, priority: int = 0) -> PagePath:
        """Take hold of a match, for a request that starts to run."""
        assert match.found is not None
        node = self.tree.lock(match.found, now, priority)
        return PagePath(match.namespace, match.found.pages[:], node, priority)

    def make_room(self, num_pages: int, now: float) -> None:
        """Evict until num_pages pages are free, as far as that can be."""
        if num_pages > self._pool.num_free:
            evicted = self.tree.evict(num_pages - self._pool.num_free, now)
            self.num_evicted_pages += len(evicted)
            self._pool.free(evicted)

    @timed
    def reserve(self, path: PagePath, num_tokens: int, now: float) -> PageWrite | None:
        """Let the path cover num_tokens positions, evicting as needed. Returns the new pages; None if there were enough.

        The scheduler has made sure that free + evictable pages suffice; if they do not, that is a bug.
        """
        num_missing = path.num_missing(num_tokens, self.page_size)
        self.make_room(num_missing, now)
        return path.grow_from(self._pool, num_missing)

    @timed
    def reserve_all(self, wanted: Sequence[tuple[PagePath, int]], now: float) -> list[PageWrite | None]:
        """reserve() of each (path, num_tokens), in this order, with room made once for all of them."""
        missing = [path.num_missing(num_tokens, self.page_size) for path, num_tokens in wanted]
        self.make_room(sum(num for num in missing if num > 0), now)
        return grow_all(self._pool, wanted, missing)

    @timed
    def commit(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_under_way: bool = False) -> PageWrite | None:
        """Publish the whole pages among the first num_computed positions, so that others can use them from the next step on.

        Where somebody else published the same tokens first, the tree's pages win: they replace the path's own, which are freed; if the
        step that computes them is under way, by drop_replaced() after it.
        Returns that replacement, which the page table must follow; None if there is none.
        """
        write = self._commit(path, token_ids, num_computed, now)
        if not is_under_way:
            self.drop_replaced(path)
        return write

    def drop_replaced(self, path: PagePath) -> None:
        self._pool.free(path.replaced)
        del path.replaced[:]

    def _commit(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float) -> PageWrite | None:
        first_page, num_whole = path.num_shared, num_computed // self.page_size
        if num_whole <= first_page:
            return None
        assert path.node is not None, "expected a path that is still locked"
        own = path.pages[first_page:num_whole]
        tokens = token_ids[first_page * self.page_size : num_whole * self.page_size]
        inserted = self.tree.insert(TreeKey.of(path.namespace, tokens), own, now, at=path.node, priority=path.priority)
        self.tree.move_lock(path.node, inserted.node)
        path.node, path.num_shared = inserted.node, num_whole
        replaced = inserted.existing_pages
        if not replaced:
            return None
        path.replaced.extend(own[: len(replaced)])
        path.pages[first_page : first_page + len(replaced)] = replaced
        return PageWrite(first_page, replaced)

    @timed
    def release(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_over: bool = True) -> None:
        """End a path: publish what was computed, unlock it, free the rest. The path must not be used any more.

        is_over: the request will not come back for the same; policies learn from a request once.
        """
        self._commit(path, token_ids, num_computed, now)
        self.drop_replaced(path)
        assert path.node is not None, "expected a path that was not released before"
        self.tree.unlock(path.node, now)
        path.node = None
        if is_over:
            self.tree.order.observe(path.namespace, token_ids, num_computed)
        self._pool.free(path.private_pages)

    def num_given_back(self, paths: Sequence[PagePath], match: PrefixMatch) -> Iterator[int]:
        """Pages that would become free or evictable if the paths were released one after the other: the sum so far, for each.

        Without those that the match would take hold of again; a page that others hold too does not count.
        """
        assert match.found is not None
        total = 0
        for path, num_unlocked in zip(paths, num_unlocked_by([path.node for path in paths], match.found), strict=True):
            total += len(path.private_pages) + num_unlocked
            yield total

    @timed
    def flush(self, now: float) -> None:
        """Forget all cached prefixes. Nothing may run."""
        self._pool.free(self.tree.clear(now))

    @timed
    def pin(self, namespace: Namespace, token_ids: IntArray, ttl_s: float, now: float) -> PinResult:
        """Keep what is cached of these tokens, in whole pages from their start, for ttl_s seconds: evicted after all that is not pinned.

        As far as the budget goes, max_pinned_fraction of the pool; num_tokens of the result says how far that was.
        """
        return self.tree.pin(TreeKey.of(namespace, token_ids), now + ttl_s, now)

    def num_pinned_pages(self, now: float) -> int:
        self.tree.expire_pins(now)
        return self.tree.pins.num_pages

    def watch(self, watcher: TreeWatcher) -> TreeNode | None:
        """Tell the watcher, in place of any earlier one, what changes from now on. Returns the tree's root; None if there is no tree."""
        self.tree.watcher = TimedApart(watcher, self)
        return self.tree.root

    def explain(self, namespace: Namespace, token_ids: IntArray) -> MatchExplanation | None:
        """Why a prompt hits or misses, without changing anything."""
        return explain(self.tree, namespace, token_ids)

    def check_account(self, paths: Iterable[PagePath]) -> None:
        """Recount all pages, given all live paths; AssertionError if anything is off. With no path, nothing may be locked."""
        paths = list(paths)
        check_tree(self.tree)
        check_pages(self._pool, self.tree, [path.private_pages + path.replaced for path in paths])
        assert self.tree.root.lock_ref == len(paths), f"expected {len(paths)} locks, got {self.tree.root.lock_ref}"
        for path in paths:
            assert path.node is not None, "a live path was released"
            shared: list[int] = []
            node: TreeNode | None = path.node
            while node is not None and node.pages is not None:
                shared[:0] = node.pages
                node = node.parent
            assert shared == list(path.pages[: path.num_shared]), "a path's shared pages are not those of its node"
