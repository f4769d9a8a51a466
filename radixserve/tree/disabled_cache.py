"""DisabledCache: PrefixCache's plain twin. Same door, nothing shared: --disable-radix-cache, and the oracle in tests."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from radixserve.core import IntArray, Namespace, PageWrite
from radixserve.tree.account import check_pages
from radixserve.tree.explain import MatchExplanation
from radixserve.tree.node import TreeNode
from radixserve.tree.page_path import PagePath, grow_all
from radixserve.tree.page_pool import PagePool
from radixserve.tree.pins import PinResult
from radixserve.tree.prefix_cache import PrefixMatch, timed
from radixserve.tree.watcher import TreeWatcher


class DisabledCache:
    is_shared = False
    growth = 0
    num_evictable_pages = 0
    num_locked_pages = 0

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        self.page_size = page_size
        self.seconds = 0.0
        self.num_evicted_pages = 0
        self._pool = PagePool(num_pages, page_size)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    def match(self, namespace: Namespace, token_ids: IntArray, max_len: int) -> PrefixMatch:
        return PrefixMatch(namespace, 0, 0, None)

    def lock(self, match: PrefixMatch, now: float, priority: int = 0) -> PagePath:
        return PagePath(match.namespace, array("i"), None)

    @timed
    def reserve(self, path: PagePath, num_tokens: int, now: float) -> PageWrite | None:
        return path.grow_from(self._pool, path.num_missing(num_tokens, self.page_size))

    @timed
    def reserve_all(self, wanted: Sequence[tuple[PagePath, int]], now: float) -> list[PageWrite | None]:
        return grow_all(self._pool, wanted, [path.num_missing(num_tokens, self.page_size) for path, num_tokens in wanted])

    def commit(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_under_way: bool = False) -> PageWrite | None:
        return None

    def drop_replaced(self, path: PagePath) -> None:
        pass

    @timed
    def release(self, path: PagePath, token_ids: IntArray, num_computed: int, now: float, is_over: bool = True) -> None:
        self._pool.free(path.private_pages)

    def num_given_back(self, paths: Sequence[PagePath], match: PrefixMatch) -> Iterator[int]:
        return accumulate(len(path.pages) for path in paths)

    def flush(self, now: float) -> None:
        pass

    def pin(self, namespace: Namespace, token_ids: IntArray, ttl_s: float, now: float) -> PinResult:
        return PinResult(0, now + ttl_s)

    def num_pinned_pages(self, now: float) -> int:
        return 0

    def watch(self, watcher: TreeWatcher) -> TreeNode | None:
        return None

    def explain(self, namespace: Namespace, token_ids: IntArray) -> MatchExplanation | None:
        return None

    def check_account(self, paths: Iterable[PagePath]) -> None:
        check_pages(self._pool, None, [path.private_pages for path in paths])
