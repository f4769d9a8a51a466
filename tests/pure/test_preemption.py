"""Preemption is bounded, happens only where the head comes in for it in the same step, and is all or none."""

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from radixserve.core import Request
from radixserve.scheduler.state import RequestState
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request


def with_priority(one: Request, priority: int) -> Request:
    return dataclasses.replace(one, priority=priority)


def low(name: str, tokens: Iterable[int], max_tokens: int) -> Request:
    return with_priority(request(name, tokens, max_tokens, ignore_eos=True), -20)


@pytest.mark.parametrize("is_shared", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("max_retractions", [0, 1, 4])
def test_an_endless_urgent_stream_preempts_so_often_and_no_more(max_retractions: int, is_shared: bool) -> None:
    """Without a tree each time costs the whole prompt: it may neither go on for ever nor hit one that got nothing out of its turn."""
    bench = Bench(rows=1, chunk=32, num_pages=400, is_shared=is_shared, max_retractions=max_retractions)
    bench.add(low("low", range(2, 202), 40))
    outputs_at_preemption: list[int] = []
    for i in range(300):
        if i % 6 == 0:
            bench.add(request(f"urgent{i}", [500 + i, 6], max_tokens=2, ignore_eos=True))
        before = bench.scheduler.totals.retracted_total
        bench.step()
        if bench.scheduler.totals.retracted_total > before:
            outputs_at_preemption.append(len(bench.tokens("low")))
    bench.drain()
    assert outputs_at_preemption == sorted(set(outputs_at_preemption)), "new output between any two"
    assert len(outputs_at_preemption) == max_retractions
    assert bench.tokens("low") == expected_tokens(range(2, 202), 40)
    num_urgent_tokens = 50 * 2
    assert bench.scheduler.totals.prefill_tokens_total <= num_urgent_tokens + (1 + max_retractions) * 240


def test_nobody_is_preempted_for_one_that_a_long_prompt_keeps_out_of_this_step() -> None:
    bench = Bench(rows=2, chunk=16, num_pages=400)
    bench.add(low("low", range(2, 6), 60))
    bench.step()
    bench.add(with_priority(request("long", range(100, 200), 1), 30))
    bench.step()
    bench.add(request("urgent", range(300, 304), 1))
    while not bench.final_or_none("long"):
        assert bench.scheduler.totals.retracted_total == 0
        bench.step()
    bench.drain()
    assert bench.tokens("urgent") == expected_tokens(range(300, 304), 1)
    assert bench.tokens("low") == expected_tokens(range(2, 6), 60)


def test_a_victim_whose_long_prompt_takes_the_whole_step_leaves_it_to_the_urgent_one() -> None:
    bench = Bench(rows=1, chunk=16, num_pages=400)
    bench.add(low("long", range(2, 102), 2))
    bench.step()
    bench.add(request("urgent", range(300, 304), 1))
    bench.step()
    assert bench.scheduler.totals.retracted_total == 1
    assert bench.final("urgent").queue_time_s <= 1.0
    bench.drain()
    assert bench.tokens("long") == expected_tokens(range(2, 102), 2)


@pytest.mark.parametrize("num_low", [1, 2])
def test_pages_that_others_hold_too_are_no_gain(num_low: int) -> None:
    """Sixty pages are shared: by two low ones, who give them back together, or by a low one and one that stays."""
    bench = Bench(rows=8, chunk=128, num_pages=100)
    shared = list(range(2, 62))
    for i in range(2):
        one = low(f"a{i}", [*shared, 900 + i], 8)
        bench.add(one if i < num_low else with_priority(one, 0))
        bench.step()
    assert bench.scheduler.num_running == 2
    bench.add(request("urgent", range(300, 350), 2, ignore_eos=True))
    bench.step()
    assert bench.scheduler.totals.retracted_total == (2 if num_low == 2 else 0)
    assert (bench.scheduler.num_running == 1) == (num_low == 2), "all, and it came in, or none"
    bench.drain()
    assert bench.tokens("urgent") == expected_tokens(range(300, 350), 2)
    for i in range(2):
        assert bench.tokens(f"a{i}") == expected_tokens([*shared, 900 + i], 8)


def test_pages_that_the_urgent_one_would_hold_itself_are_no_gain() -> None:
    bench = Bench(rows=8, chunk=128, num_pages=100)
    shared = list(range(2, 42))
    bench.add(low("low", [*shared, 900], 4), request("stays", range(500, 520), 20, ignore_eos=True))
    bench.step()
    bench.add(request("urgent", [*shared, *range(300, 330)], 2, ignore_eos=True))
    bench.step()
    # 100 - 39 of the one that stays: 61 at most, and it needs 71
    assert bench.scheduler.totals.retracted_total == 0
    bench.drain()
    assert bench.tokens("urgent") == expected_tokens([*shared, *range(300, 330)], 2)


def spy_on_preemption(bench: Bench) -> list[Request]:
    """Fills with the requests that somebody is preempted for."""
    preemption, waiting, favoured = bench.scheduler._preemption, bench.scheduler._waiting, []
    plan = preemption.victims

    def victims(*args: Any) -> list[RequestState]:
        planned = plan(*args)
        if planned:
            favoured.append(waiting.head().request)
        return planned

    preemption.victims = victims  # type: ignore[method-assign]
    return favoured


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 60, 10)])
def test_whoever_somebody_gives_way_to_runs_in_that_step(seeds: range) -> None:
    assert sum(map(num_preemptions_for_something, seeds)) > 20


def num_preemptions_for_something(seed: int) -> int:
    """Of one load; AssertionError at the first that was for nothing, or at a wrong answer."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    bench = Bench(
        96 // page_size,
        page_size,
        chunk=rng.choice([16, 64]),
        rows=rng.randrange(2, 7),
        is_shared=rng.random() < 0.8,
        policy="fcfs",
        schedule_conservativeness=rng.choice([0.0, 1.0]),
        priority_scheduling_preemption_threshold=rng.randrange(3),
    )
    favoured = spy_on_preemption(bench)
    prompts = [[rng.randrange(2, 4)] * rng.randrange(1, 30) + [rng.randrange(2, 9)] for _ in range(30)]
    pending = list(enumerate(prompts))
    while pending or bench.scheduler.has_work:
        if pending and rng.random() < 0.5:
            number, prompt = pending.pop()
            bench.add(with_priority(request(str(number), prompt, rng.randrange(1, 20), ignore_eos=True), rng.randrange(6)))
        num_before = len(favoured)
        bench.step()
        for head in favoured[num_before:]:
            assert any(row.request is head for row in bench.batches[-1].rows), f"somebody gave way to {head.request_id} for nothing"
    for number, prompt in enumerate(prompts):
        got = bench.tokens(str(number))
        assert got == expected_tokens(prompt, len(got))
    return len(favoured)
