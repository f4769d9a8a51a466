"""The simulator's runs against their bounds, their own counters and themselves: one by one or at once, in one process or several."""

import json

import pytest

from bench.simulator.fleet import FOREVER, Fleet, run_fleet
from bench.simulator.load import Load
from bench.simulator.replica import Replica
from bench.simulator.result import Result, result_of
from bench.simulator.router import ROUTERS, make_router
from radixserve.tree.adaptive import ADAPTIVE
from radixserve.tree.eviction import EVICTION_POLICIES
from tests.pure.simulated import COST, conversations, run_alone, settings


@pytest.mark.parametrize("eviction", [*EVICTION_POLICIES, ADAPTIVE])
@pytest.mark.parametrize(("order", "rows"), [("lpm", 16), ("fcfs", 1), ("fcfs", 16)])
def test_no_policy_beats_the_bound_and_the_bound_not_the_ceiling(eviction: str, order: str, rows: int) -> None:
    load = Load(conversations(200, seed=3))
    hits = []
    for pool_blocks in (70, 120, 1600):
        replica = run_alone(load, settings(pool_blocks, order, eviction, rows))
        counts = result_of(replica, load, with_bounds=True).counts
        assert counts.requests + counts.refused == 200
        assert 0 < counts.hit_tokens <= counts.bound_tokens <= counts.ceiling_tokens < counts.prompt_tokens
        hits.append(counts.hit_tokens)
    assert hits[0] < hits[-1]


def test_a_pool_that_holds_everything_reaches_the_ceiling() -> None:
    load = Load(conversations(300, seed=4))
    replica = run_alone(load, settings(pool_blocks=20_000, rows=1))
    counts = result_of(replica, load, with_bounds=True).counts
    assert counts.hit_tokens == counts.bound_tokens == counts.ceiling_tokens > 0
    assert counts.evicted_tokens == 0


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_steps_planned_at_once_are_the_steps_planned_one_by_one(max_tokens: int | None) -> None:
    """1,000 requests: the same requests in the same order at the same times, to the last bit."""
    load = Load(conversations(1000, seed=6), rate_hz=3.0, max_tokens=max_tokens)
    at_once, single = (run_alone(load, settings(300, repeats_steps=repeats)) for repeats in (True, False))
    assert at_once.num_repeated_steps > 1000
    assert single.num_repeated_steps == 0
    assert at_once.num_steps + at_once.num_repeated_steps == single.num_steps
    assert at_once.now == single.now
    assert at_once.ttft_s == single.ttft_s
    assert at_once.events == single.events
    assert at_once.scheduler.totals == single.scheduler.totals
    assert at_once.scheduler.new_token_ratio == single.scheduler.new_token_ratio
    assert at_once.cache.num_evicted_pages == single.cache.num_evicted_pages > 0


def test_hits_counted_from_the_batches_are_the_schedulers() -> None:
    load = Load(conversations(400, seed=7))
    replica = run_alone(load, settings())
    totals = replica.scheduler.totals
    assert replica.num_hit_tokens == totals.cached_tokens_total > 0
    if totals.retracted_total == 0:
        assert totals.prefill_tokens_total == totals.prompt_tokens_total - totals.cached_tokens_total
    assert totals.prompt_tokens_total == sum(load.prompt_len(number) for number in range(400))
    assert totals.generation_tokens_total == sum(load.output_len(number) for number in range(400))
    assert len(replica.ttft_s) == 400
    assert min(replica.ttft_s) > 0


def test_without_reuse_everything_is_computed() -> None:
    load = Load(conversations(100, seed=8))
    counts = result_of(run_alone(load, settings(eviction="none")), load, with_bounds=False).counts
    assert counts.hit_tokens == 0
    assert counts.prefilled_tokens == counts.prompt_tokens


# ---- fleets and loads


@pytest.mark.parametrize("router", list(ROUTERS))
def test_a_fleet_gives_the_same_in_one_process_and_in_three(router: str) -> None:
    load = Load(conversations(200, seed=9), num_requests=500, rate_hz=12.0, seed=1)
    one, again, three = (
        run_fleet(load, settings(200), COST, Fleet(num_replicas=5, router=router, num_processes=processes)) for processes in (1, 1, 3)
    )
    assert figures(one) == figures(again) == figures(three)
    assert one.counts.requests == 500
    assert one.counts.hit_tokens <= one.counts.bound_tokens


def figures(result: Result) -> list[object]:
    counts = json.loads(result.to_bytes()[4 : -8 * len(result.ttft_s)])
    del counts["cpu_s"]
    return [counts, sorted(result.ttft_s)]


def test_windows_do_not_change_what_replicas_do() -> None:
    load = Load(conversations(300, seed=10))
    whole = run_alone(load, settings())
    piecewise, number = Replica(load, settings(), COST), 0
    for window in range(1, 2000):
        while number < 300 and load.arrival_s(number) < window * 0.1:
            piecewise.submit(number)
            number += 1
        piecewise.run_until(window * 0.1)
    piecewise.run_until(FOREVER)
    assert piecewise.ttft_s == whole.ttft_s
    assert piecewise.events == whole.events


def test_copies_share_only_what_everybody_has() -> None:
    load = Load(conversations(50, seed=11), num_requests=200, seed=2)
    assert [load.arrival_s(number) for number in range(200)] == sorted(load.arrival_s(number) for number in range(200))
    by_block: dict[int, int] = {}
    for number in range(200):
        for block in set(load.block_ids(number)):
            by_block[block] = by_block.get(block, 0) + 1
    assert by_block[0] == 200
    assert len(by_block) > 4 * 0.8 * load.trace.num_block_ids


def test_routers_send_equal_beginnings_to_one_place() -> None:
    prompt = [0, 7, 8, 9, 10]
    aware = make_router("cache-aware", 4, capacity=100, seed=0)
    first = aware.choose(prompt, [0, 0, 0, 0])
    assert aware.choose([*prompt, 11], [3, 3, 3, 3]) == first
    assert aware.choose([0, 99, 98, 97], [3, 3, 3, 3]) != first, "one block of four is no match"
    loads = [200, 200, 200, 200]
    loads[(first + 1) % 4] = 0
    assert aware.choose(prompt, loads) == (first + 1) % 4, "uneven loads go first"
    hashed = make_router("consistent-hash", 4, capacity=100, seed=0)
    assert len({hashed.choose([0, 5, tail], [0] * 4) for tail in range(20)}) == 1
    assert len({hashed.choose([0, second], [0] * 4) for second in range(100)}) == 4
    assert make_router("least-loaded", 3, capacity=100, seed=0).choose(prompt, [2, 1, 2]) == 1
    spread = make_router("round-robin", 3, capacity=100, seed=0)
    assert [spread.choose(prompt, [0] * 3) for _ in range(4)] == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="router: expected one of round-robin"):
        make_router("nearest", 3, capacity=100, seed=0)


def test_the_cache_aware_router_forgets_what_was_sent_longest_ago() -> None:
    aware = make_router("cache-aware", 2, capacity=4, seed=0)
    first = aware.choose([1, 2, 3], [0, 0])
    other = aware.choose([4, 5], [0, 0])
    assert other != first, "who was sent the least"
    aware.choose([6, 7, 8], [9, 0] if first else [0, 9])
    assert aware.choose([4, 5, 9], [5, 5]) != first, "blocks 4 and 5 fell out of a memory of 4"
