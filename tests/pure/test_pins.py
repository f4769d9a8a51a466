"""Pins: kept for a time within a budget, evicted last and only when nothing else is left; the account holds all the while."""

import pytest

from radixserve.config import CacheConfig, EngineConfig
from radixserve.core import BASE_NAMESPACE as BASE
from radixserve.core import Namespace, Request, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.errors import InvalidRequestError
from radixserve.tree.account import check_tree
from radixserve.tree.prefix_cache import PrefixCache
from radixserve.tree.radix_tree import RadixTree
from tests.pure.bench import Bench
from tests.pure.helpers import ints, key, request
from tests.pure.test_prefix_cache import run
from tests.support.echo_engine import EchoEngine


def cached(cache: PrefixCache, *tokens: int) -> int:
    return cache.match(BASE, ints(*tokens, 0), 10**6).num_tokens


def make(num_pages: int = 20, page_size: int = 1, fraction: float = 0.5, policy: str = "lru") -> PrefixCache:
    return PrefixCache(num_pages, page_size, policy, max_pinned_fraction=fraction)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority", "adaptive"])
def test_a_pin_outlives_what_came_later_and_expires(policy: str) -> None:
    cache = make(policy=policy)
    run(cache, ints(range(100, 105)), 1)
    assert cache.pin(BASE, ints(range(100, 105)), 10, 2) == (5, 12)
    assert cache.num_evictable_pages == 5, "pinned counts as evictable"
    for now in range(3, 12):
        run(cache, ints(range(1000 * now, 1000 * now + 9)), now)
        assert cached(cache, *range(100, 105)) == 5
    assert cache.num_pinned_pages(11) == 5
    for now in (12, 13, 14):
        run(cache, ints(range(1000 * now, 1000 * now + 9)), now)
        cache.check_account([])
    assert cache.num_pinned_pages(14) == 0
    assert cached(cache, *range(100, 105)) == 0


def test_a_pin_goes_when_a_request_would_not_fit_otherwise() -> None:
    cache = make()
    run(cache, ints(range(5)), 1)
    cache.pin(BASE, ints(range(5)), 100, 2)
    run(cache, ints(range(100, 118)), 3)  # 18 of 20 pages: three of the five have to go, from the end
    assert cached(cache, *range(5)) == 2
    assert cache.num_pinned_pages(3) == 2


@pytest.mark.parametrize(("page_size", "kept"), [(1, 10), (4, 8)])
def test_what_exceeds_the_budget_is_clipped_from_the_end(page_size: int, kept: int) -> None:
    cache = make(num_pages=-(-20 // page_size), page_size=page_size)
    tokens = ints(range(16))
    run(cache, tokens, 1)
    assert cache.pin(BASE, tokens, 50, 2).num_tokens == kept
    assert cache.pin(BASE, ints(range(100, 104)), 50, 3).num_tokens == 0, "nothing is cached of it"
    run(cache, ints(range(200, 204)), 4)
    assert cache.pin(BASE, ints(range(200, 204)), 50, 5).num_tokens == 0, "the budget is used up"
    assert cache.pin(BASE, tokens, 100, 6) == (kept, 106), "what is pinned may be pinned for longer"
    cache.check_account([])
    assert cache.num_pinned_pages(53) == kept // page_size
    assert cache.num_pinned_pages(106) == 0


def test_a_shared_start_counts_once_and_keeps_the_longest_time() -> None:
    cache = make()
    for last, until in ((50, 20), (60, 10)):
        run(cache, ints(1, 2, 3, last), 1)
        assert cache.pin(BASE, ints(1, 2, 3, last), until, 2).num_tokens == 4
    assert cache.num_pinned_pages(2) == 5
    assert cache.num_pinned_pages(13) == 4
    assert cache.num_pinned_pages(22) == 0
    cache.check_account([])


def test_a_pin_of_one_namespace_is_none_of_another() -> None:
    cache = make()
    run(cache, ints(1, 2, 3), 1, Namespace(cache_salt="a"))
    assert cache.pin(BASE, ints(1, 2, 3), 10, 2).num_tokens == 0
    assert cache.pin(Namespace(cache_salt="a"), ints(1, 2, 3), 10, 2).num_tokens == 3


def test_a_pinned_edge_does_not_grow_into_the_budget() -> None:
    """The next turn of a pinned prompt is not pinned with it."""
    cache = make(fraction=0.2)
    tokens = ints(range(4))
    run(cache, tokens, 1)
    assert cache.pin(BASE, tokens, 50, 2).num_tokens == 4
    run(cache, ints(range(4), 7, 8, 9, 10), 3)
    assert cache.num_pinned_pages(3) == 4
    cache.check_account([])


def test_a_lock_on_a_pinned_path_and_a_flush() -> None:
    cache = make()
    run(cache, ints(range(5)), 1)
    cache.pin(BASE, ints(range(5)), 3, 2)
    path = cache.lock(cache.match(BASE, ints(range(5), 9), 10**6), 3)
    assert cache.num_pinned_pages(6) == 0, "it expires while it is locked"
    cache.check_account([path])
    cache.release(path, ints(range(5), 9), 5, 7)
    cache.pin(BASE, ints(range(5)), 9, 8)
    cache.flush(9)
    assert (cache.num_pinned_pages(9), cache.num_free_pages) == (0, 20)
    cache.check_account([])


def test_pinned_again_and_again_the_book_stays_small() -> None:
    tree = RadixTree(max_pinned_pages=10)
    tree.insert(key(1, 2, 3), ints(1, 2, 3), 0)
    for now in range(1, 2000):
        tree.pin(key(1, 2, 3), now + 5000, now)
    assert len(tree.pins._heap) <= 2 + 64
    check_tree(tree)


def test_the_scheduler_pins_a_prompt_once_it_is_computed() -> None:
    bench = Bench(num_pages=64, chunk=8, rows=4)
    assert isinstance(bench.cache, PrefixCache)
    bench.cache.tree.pins.max_pages = 32
    prompt = ints(range(2, 22))
    bench.add(Request("a", prompt, SamplingParams(max_tokens=3), pin_ttl_s=1000.0))
    bench.drain()
    assert bench.final("a").num_pinned_tokens == 20
    assert bench.cache.num_pinned_pages(bench.now) == 20
    for number in range(6):
        bench.add(request(f"b{number}", range(1000 * number + 100, 1000 * number + 130), max_tokens=2))
        bench.drain()
    assert bench.cache.num_evicted_pages > 100
    assert bench.cache.match(BASE, ints(prompt, 7), 10**6).num_tokens == 20
    assert bench.final("b0").num_pinned_tokens is None


@pytest.mark.parametrize(
    ("cache", "ttl_s", "message"),
    [
        (CacheConfig(max_pinned_fraction=0.0), 5.0, "nothing can be pinned at --max-pinned-fraction 0"),
        (CacheConfig(disable_radix_cache=True), 5.0, "nothing can be pinned with --disable-radix-cache"),
        (CacheConfig(), 0.0, "expected a number of seconds"),
        (CacheConfig(), float("nan"), "expected a number of seconds"),
        (CacheConfig(), 86401.0, "expected a number of seconds"),
    ],
)
def test_the_engine_refuses_what_it_cannot_pin(cache: CacheConfig, ttl_s: float, message: str) -> None:
    config, bench = EngineConfig(cache=cache), Bench()
    engine = Engine(config, EchoEngine(config).info, bench.scheduler, bench.runner)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(Request("a", ints(1, 2), pin_ttl_s=ttl_s))
    assert not engine.has_work
