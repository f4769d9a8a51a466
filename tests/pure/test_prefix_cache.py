"""The door: what a request holds, what it shares, what comes back; PrefixCache and its plain twin under one contract."""

import time
from array import array

import pytest

from radixserve.core import BASE_NAMESPACE as BASE
from radixserve.core import Namespace
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.page_path import PagePath
from radixserve.tree.page_pool import PagePool
from radixserve.tree.prefix_cache import PageCache, PrefixCache
from tests.pure.helpers import ints


def run(cache: PageCache, tokens: "array[int]", now: float, namespace: Namespace = BASE) -> tuple[int, list[int]]:
    """A request that computes its tokens and ends; returns what it re-used and its pages."""
    match = cache.match(namespace, tokens, 10**6)
    path = cache.lock(match, now)
    cache.reserve(path, len(tokens), now)
    pages = list(path.pages)
    cache.check_account([path])
    cache.release(path, tokens, len(tokens), now)
    cache.check_account([])
    return match.num_tokens, pages


@pytest.mark.parametrize(
    ("page_size", "length", "reused"), [(1, 10, 9), (1, 1, 0), (4, 10, 8), (4, 8, 4), (4, 9, 8), (16, 16, 0), (16, 17, 16)]
)
def test_a_fully_cached_prompt_computes_at_least_one_token(page_size: int, length: int, reused: int) -> None:
    cache = PrefixCache(32, page_size)
    tokens = ints(range(length))
    assert run(cache, tokens, 1)[0] == 0
    assert run(cache, tokens, 2)[0] == reused


def test_the_disabled_cache_shares_nothing_and_keeps_nothing() -> None:
    cache = DisabledCache(32, 4)
    for now in (1, 2):
        assert run(cache, ints(range(17)), now)[0] == 0
        assert cache.num_free_pages == 32


def test_the_trees_pages_win_and_duplicates_come_back() -> None:
    """TREE-14: two requests compute the same prefix; the second one's table must follow the tree's pages."""
    cache = PrefixCache(40)
    tokens = ints(range(10))
    first, second = (cache.lock(cache.match(BASE, tokens, 10**6), 1) for _ in range(2))
    for path in (first, second):
        cache.reserve(path, 10, 1)
    own_second = list(second.pages)
    assert cache.commit(first, tokens, 10, 2) is None
    write = cache.commit(second, tokens, 10, 3)
    assert write is not None
    assert write.first_page == 0
    assert list(write.page_ids) == list(first.pages) == list(second.pages) != own_second
    cache.check_account([first, second])
    assert cache.num_free_pages == 30
    cache.reserve(second, 12, 4)
    cache.release(first, tokens, 10, 5)
    cache.check_account([second])
    cache.release(second, ints(range(12)), 12, 6)
    cache.check_account([])
    assert cache.num_evictable_pages == 12


def test_a_half_filled_page_is_never_shared() -> None:
    """TREE-01, TREE-23: eight sequences part ways in the middle of a page."""
    cache = PrefixCache(64, 16)
    shared = list(range(20))
    pages_seen = []
    for i in range(8):
        tokens = ints(shared, range(100 + 50 * i, 130 + 50 * i))
        reused, pages = run(cache, tokens, i)
        assert reused == (16 if i else 0)
        pages_seen.append(pages)
    assert len({pages[0] for pages in pages_seen}) == 1
    second_pages = [pages[1] for pages in pages_seen]
    assert len(set(second_pages)) == 8


def test_chunks_are_published_as_they_are_computed() -> None:
    cache = PrefixCache(64, 4)
    tokens = ints(range(20))
    path = cache.lock(cache.match(BASE, tokens, 10**6), 1)
    for end in (7, 14, 20):
        cache.reserve(path, end, end)
        cache.commit(path, tokens, end, end)
        assert cache.match(BASE, ints(range(21)), 10**6).num_tokens == end - end % 4
        cache.check_account([path])
    cache.release(path, tokens, 14, 30)
    cache.check_account([])


def test_released_half_way_nothing_is_offered_that_was_freed() -> None:
    """TREE-16, TREE-18: abort when the computed length is no multiple of the page size; free pages are not in the tree."""
    cache = PrefixCache(16, 16)
    tokens = ints(range(100))
    path = cache.lock(cache.match(BASE, tokens, 10**6), 1)
    cache.reserve(path, 64, 1)
    cache.commit(path, tokens, 40, 2)
    cache.release(path, tokens, 40, 3)
    cache.check_account([])
    assert (cache.num_evictable_pages, cache.num_free_pages) == (2, 14)
    assert run(cache, ints(range(1000, 1000 + 255)), 4)[0] == 0
    assert cache.match(BASE, tokens, 10**6).num_tokens == 0


def test_reserve_evicts_on_demand_and_a_locked_path_survives() -> None:
    cache = PrefixCache(12)
    run(cache, ints(range(8)), 1)
    path = cache.lock(cache.match(BASE, ints(range(4)), 10**6), 2)  # 3 tokens are locked
    assert cache.reserve(path, 12, 3) is not None
    cache.check_account([path])
    assert (cache.num_free_pages, cache.num_evictable_pages, cache.num_locked_pages) == (0, 0, 3)
    assert cache.num_evicted_pages == 5
    with pytest.raises(AssertionError, match="asked for 1"):
        cache.reserve(path, 13, 4)
    cache.check_account([path])


def test_salts_and_adapters_are_apart() -> None:
    cache = PrefixCache(64)
    tokens = ints(range(8))
    assert run(cache, tokens, 1, Namespace(adapter="lora@1"))[0] == 0
    assert run(cache, tokens, 2, Namespace(adapter="lora@2"))[0] == 0
    assert run(cache, tokens, 3)[0] == 0
    assert run(cache, tokens, 4, Namespace(adapter="lora@1"))[0] == 7


def test_flush_frees_everything() -> None:
    cache = PrefixCache(16)
    run(cache, ints(range(9)), 1)
    cache.flush(2)
    cache.check_account([])
    assert cache.num_free_pages == 16
    assert cache.match(BASE, ints(range(9)), 10**6).num_tokens == 0


def test_a_missed_page_is_found_by_the_account() -> None:
    """The account must be able to fail: a leak, a page with two owners, a lock that stays."""
    cache = PrefixCache(8)
    path = cache.lock(cache.match(BASE, ints(1, 2), 10**6), 1)
    cache.reserve(path, 2, 1)
    with pytest.raises(AssertionError, match="no owner or several"):
        cache.check_account([])
    double = PagePath(BASE, path.pages[:], path.node)
    double.num_shared = 0
    with pytest.raises(AssertionError, match="no owner or several"):
        cache.check_account([path, double])
    cache.release(path, ints(1, 2), 2, 2)
    cache.tree.lock(cache.tree.match(_key()), 3)
    with pytest.raises(AssertionError, match="locks"):
        cache.check_account([])


def _key():  # type: ignore[no-untyped-def]
    from tests.pure.helpers import key

    return key(1, 2)


def test_the_pool_refuses_a_double_free_and_never_hands_out_page_0() -> None:
    """TREE-02."""
    pool = PagePool(4)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    pool.free(ints(2))
    for wrong in (2, 0, 5, -1):
        with pytest.raises(AssertionError, match="freed twice"):
            pool.free(ints(wrong))
    with pytest.raises(AssertionError, match="free pages"):
        pool.allocate(2)


class SlowWatcher:
    """Takes its time over each piece of news."""

    def __init__(self) -> None:
        self.num_told = 0

    def _take_time(self, *_: object) -> None:
        self.num_told += 1
        time.sleep(0.05)

    grew = split = cut = cleared = _take_time


def test_what_the_watcher_does_is_not_the_trees_time() -> None:
    cache, watcher = PrefixCache(8, 4), SlowWatcher()
    cache.watch(watcher)
    for first in (0, 100):
        run(cache, ints(range(first, first + 24)), now=1 + first)  # the second one trims the first
    run(cache, ints(range(100, 110)), now=200)  # and this one splits it, and trims its end
    cache.flush(201)
    assert watcher.num_told == 6
    assert 0 < cache.seconds < 0.05


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", [PrefixCache, DisabledCache])
def test_pages_for_a_whole_step_are_those_that_one_after_the_other_would_get(kind: type[PrefixCache], page_size: int) -> None:
    def writes(at_once: bool) -> list[tuple[int, list[int]] | None]:
        cache = kind(40, page_size)
        run(cache, ints(range(30 * page_size)), 1)  # with a tree: some of it has to be evicted
        paths = [cache.lock(cache.match(BASE, ints(500 + index), 0), 2) for index in range(4)]
        wanted = list(zip(paths, (3 * page_size, 0, 5 * page_size - page_size // 2, 6 * page_size), strict=True))
        cache.reserve(paths[3], 2 * page_size, 2)
        if isinstance(cache, PrefixCache) and not at_once:
            cache.make_room(12, 3)
        found = cache.reserve_all(wanted, 3) if at_once else [cache.reserve(path, num_tokens, 3) for path, num_tokens in wanted]
        cache.check_account(paths)
        return [write and (write.first_page, list(write.page_ids)) for write in found]

    together = writes(True)
    assert [write and (write[0], len(write[1])) for write in together] == [(0, 3), None, (0, 5), (2, 4)]
    assert together == writes(False)


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_answer_keeps_a_view_of_the_callers_tokens(page_size: int) -> None:
    """Keys look at them without a copy; an array that somebody still looks at cannot grow, and a request's grows with each token."""
    cache = PrefixCache(400 // page_size, page_size, max_pinned_fraction=0.5)
    tokens, kept = ints(range(30)), []
    for now in range(1, 6):
        match = cache.match(BASE, tokens, 10**6)
        tokens.append(now)
        path = cache.lock(match, now)
        kept += [match, path, cache.reserve(path, len(tokens), now)]
        for end in (len(tokens) // 2, len(tokens)):
            kept.append(cache.commit(path, tokens, end, now))
            tokens.append(now)
        kept += [cache.pin(BASE, tokens, 5.0, now), cache.explain(BASE, tokens)]
        tokens.append(now)
        cache.release(path, tokens, path.num_shared * page_size, now)
        tokens.extend([7, now] * 9)
        tokens[:8] = ints([now, *range(8)])  # another beginning, and one token longer
        cache.make_room(cache.num_free_pages + 2, now)
    assert all(type(node.tokens) is bytes and all(type(page) is bytes for _, page in node.children) for node in cache.tree.nodes())
    cache.check_account([])
