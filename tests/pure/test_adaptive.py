"""The adaptive policy on traces whose best policy is known, by whole replays through the real cache; and the duel itself."""

import random
import time
from array import array
from itertools import chain, pairwise

import pytest

from bench.eviction import main, replay_tree
from radixserve.core import IntArray
from radixserve.tree.adaptive import AdaptiveOrder, Duel
from radixserve.tree.prefix_cache import PrefixCache
from radixserve.tree.radix_tree import RadixTree
from tests.pure.bench import Bench
from tests.pure.helpers import ints, key, request

NUM_PAGES, PAGE_SIZE = 256, 64


def test_a_trace_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-trace.jsonl"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("No such file or directory: 'no-such-trace.jsonl'\n")


def prompt(session: int, num_pages: int) -> IntArray:
    return array("i", (session,)) * (num_pages * PAGE_SIZE)


def conversations_among_one_offs(num_prompts: int) -> list[IntArray]:
    """Every sixth prompt is one of twenty conversations, which so comes back after longer than lru keeps anything."""
    return [prompt(turn // 6 % 20 if turn % 6 == 0 else 1000 + turn, 4) for turn in range(num_prompts)]


def quick_returns(first: int, num_prompts: int) -> list[IntArray]:
    """Each prompt comes three times within what lru keeps, and never again: what was seen again is the least worth keeping."""
    return [prompt(first + (turn // 60) * 20 + turn % 20, 4) for turn in range(num_prompts)]


def agents(seed: int, num_prompts: int = 300, num_active: int = 16) -> list[IntArray]:
    """Sessions that grow and end, in random turns; a few prompts fill the pool, so which order hits more is mostly luck."""
    rng, num_begun, trace = random.Random(seed), 0, []
    active: list[tuple[int, int, int]] = []  # session, its pages now, rounds that it has left
    while len(trace) < num_prompts:
        if len(active) < num_active:
            active.append((num_begun, rng.randrange(10, 60), rng.randrange(2, 12)))
            num_begun += 1
        turn = rng.randrange(len(active))
        session, num_pages, num_left = active[turn]
        trace.append(prompt(session, num_pages))
        active[turn : turn + 1] = [(session, num_pages + rng.randrange(2, 15), num_left - 1)] if num_left > 1 else []
    return trace


def test_conversations_among_one_off_prompts_are_kept() -> None:
    trace = conversations_among_one_offs(3000)
    adaptive, lru = (replay_tree(trace, policy, NUM_PAGES, PAGE_SIZE) for policy in ("adaptive", "lru"))
    assert lru.num_cached == 0
    assert adaptive.hit_rate > 0.1, "a sixth is the most that there is, and the first conversations are met before anything is learnt"


def test_where_lru_is_best_it_stays() -> None:
    trace = quick_returns(0, 3000)
    slru, adaptive, lru = (replay_tree(trace, policy, NUM_PAGES, PAGE_SIZE) for policy in ("slru", "adaptive", "lru"))
    assert slru.num_cached < 0.9 * lru.num_cached, "the trace is one that a fixed policy loses"
    assert adaptive.num_cached >= 0.98 * lru.num_cached


@pytest.mark.parametrize("seed", range(8))
def test_where_a_few_prompts_fill_the_pool_luck_decides_nothing(seed: int) -> None:
    """As on TraceLab's sessions of agents in a pool of 10,000 tokens. When blocks were counted as evidence, half of these fell below."""
    trace = agents(seed)
    adaptive, lru = (replay_tree(trace, policy, 156, PAGE_SIZE) for policy in ("adaptive", "lru"))
    assert lru.num_cached > 0
    assert adaptive.num_cached >= 0.98 * lru.num_cached


def test_it_changes_its_mind_and_back() -> None:
    parts = (quick_returns(10**6, 2000), conversations_among_one_offs(3000), quick_returns(2 * 10**6, 3000))
    hits = {}
    for policy in ("adaptive", "lru"):
        so_far = [replay_tree(chain(*parts[:count]), policy, NUM_PAGES, PAGE_SIZE).num_cached for count in range(4)]
        hits[policy] = [after - before for before, after in pairwise(so_far)]
    assert hits["lru"][1] == 0
    assert hits["adaptive"][1] > 0.05 * sum(map(len, parts[1])), "it went over"
    assert hits["adaptive"][2] >= 0.9 * hits["lru"][2], "and back"
    assert sum(hits["adaptive"]) >= 0.98 * sum(hits["lru"])


def test_a_retraction_teaches_the_duel_nothing() -> None:
    """What comes back after it was no hit of anybody's."""
    bench = Bench(num_pages=2000, rows=2, chunk=256, eviction="adaptive")
    bench.add(request("a", range(2, 202), max_tokens=9, ignore_eos=True))
    for _ in range(4):
        bench.step()
        bench.scheduler._retractions.retract(bench.scheduler._running["a"], bench.now)
    bench.drain()
    assert isinstance(bench.cache, PrefixCache)
    order = bench.cache.tree.order
    assert isinstance(order, AdaptiveOrder)
    assert order.duel.lru_score == order.duel.probation_score == 0.0
    bench.add(request("b", range(2, 202), max_tokens=1))
    bench.drain()
    assert order.duel.lru_score > 0


def test_the_duel_counts_what_each_would_have_hit() -> None:
    duel = Duel(4)
    for ids in ([1, 2], [1, 2], [3, 4], [5, 6], [1, 2]):
        duel.observe(ids)
    assert duel.lru_score == pytest.approx(2 * duel._decay**6)
    assert duel.probation_score == pytest.approx(2 * duel._decay**6 + 2)


def observe_turns(duel: Duel, turns: range) -> None:
    """One of three conversations, then three one-off prompts, four blocks each: by its third turn only probation has it still."""
    for turn in turns:
        for first in (4 * (turn % 3), *(12 * turn + 100 + 4 * other for other in range(3))):
            duel.observe(list(range(first, first + 4)))


def test_the_duel_asks_for_many_requests_not_for_many_blocks() -> None:
    duel = Duel(40)
    observe_turns(duel, range(11))
    assert duel.lru_score == 0
    assert duel.probation_score > 15
    assert not duel.is_probation_better, "five requests, if of four blocks each"
    observe_turns(duel, range(11, 40))
    assert duel.is_probation_better


def test_fifty_thousand_leaves_and_no_walk() -> None:
    """MEM-02: one page at a time out of a large tree costs about log n."""
    tree = RadixTree()
    for i in range(50_000):
        tree.insert(key(i, i), ints(1, 2), now=i)
    start = time.process_time()
    for now in range(1000):
        tree.evict(1, now=50_000 + now)
    assert (time.process_time() - start) / 1000 < 100e-6
