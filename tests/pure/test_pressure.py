"""Memory pressure: optimistic admission, who gives way, and that everybody gets to an end with the right answer."""

import dataclasses
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.core import FinishReason, Request
from radixserve.errors import ContextLengthError
from radixserve.scheduler.pressure import NewTokenRatio, expected_output, loses_least
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request
from tests.support.examples import examples


def open_ended(name: str, tokens: "range | list[int]", max_tokens: int) -> Request:
    """Nothing says beforehand that it will use all of max_tokens (and it will, at a bench without EOS)."""
    return request(name, tokens, max_tokens)


def make_state(num_prompt: int, num_output: int, arrival: int = 0, priority: int = 0, **sampling: object) -> RequestState:
    one = dataclasses.replace(request("x", range(2, 2 + num_prompt), **({"max_tokens": 9000} | sampling)), priority=priority)  # type: ignore[arg-type]
    state = RequestState(one, 0.0, 100, arrival)
    state.token_ids.extend(array("i", [5] * num_output))
    return state


def test_the_new_token_ratio_falls_and_rises() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == 0.7
    ratio.after_decode_steps()
    assert ratio.value == pytest.approx(0.7 - 0.7 * 0.86 / 600)
    for _ in range(1000):
        ratio.after_decode_steps()
    assert ratio.value == pytest.approx(0.098)
    survivors = [make_state(10, 100, max_tokens=400), make_state(10, 50, max_tokens=199)]
    ratio.after_retraction(survivors)
    assert ratio.value == pytest.approx((150 + 40) / 600)
    ratio.after_retraction([])
    assert ratio.value == pytest.approx(190 / 600), "it does not fall when somebody had to give way"
    ratio.reset()
    assert ratio.value == 0.7
    assert NewTokenRatio(3.0).value == 1.0
    assert NewTokenRatio(0.0).value == 0.0


def test_expected_output() -> None:
    assert expected_output(make_state(10, 0, max_tokens=100), 0.25) == 25
    assert expected_output(make_state(10, 20, max_tokens=100), 0.25) == 20
    assert expected_output(make_state(10, 0, max_tokens=9000), 0.5) == 2048, "SGLang's clip"
    assert expected_output(make_state(10, 0, max_tokens=100, ignore_eos=True), 0.25) == 100
    assert expected_output(make_state(10, 0, max_tokens=100, ignore_eos=True, stop_token_ids=(7,)), 0.25) == 25
    assert expected_output(make_state(10, 20, max_tokens=100, min_tokens=70), 0.25) == 50
    assert expected_output(make_state(10, 0, max_tokens=0), 0.25) == 1
    guaranteed = make_state(10, 20, max_tokens=9000)
    guaranteed.is_guaranteed = True
    assert expected_output(guaranteed, 0.25) == 8980


def test_who_loses_least() -> None:
    """Lower priority, then fewest output tokens, then the longest prompt, then the latest arrival."""
    states = [
        make_state(10, 3, arrival=1),
        make_state(50, 0, arrival=2, priority=1),
        make_state(10, 1, arrival=3),
        make_state(20, 1, arrival=4),
        make_state(20, 1, arrival=5),
        make_state(90, 2, arrival=6),
    ]
    order = []
    while states:
        order.append(loses_least(states).arrival)
        states = [state for state in states if state.arrival != order[-1]]
    assert order == [5, 4, 3, 6, 1, 2]


def test_admission_does_not_reserve_all_of_max_tokens_for_those_who_run() -> None:
    """16 requests of 10 + 500 in a pool for three: they end after some tokens, so many can run at once."""
    bench = Bench(num_pages=1600, rows=16, chunk=64, eos_token_ids=())
    prompts = [[*range(20 * i + 2, 20 * i + 12)] for i in range(16)]
    for i, prompt in enumerate(prompts):
        bench.add(request(str(i), prompt, max_tokens=500, stop_token_ids=(expected_tokens(prompt, 40 + i)[-1],)))
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, bench.scheduler.num_running)
    assert most > 3
    assert all(bench.final(str(i)).finish_reason is FinishReason.STOP for i in range(16))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("is_shared", [True, False], ids=["tree", "no-tree"])
def test_three_requests_of_a_little_more_than_the_pool(is_shared: bool, page_size: int) -> None:
    """SCHED-11, SCHED-01."""
    bench = Bench(120 // page_size, page_size, 64, is_shared=is_shared, eos_token_ids=(), schedule_conservativeness=0.0)
    for i in range(3):
        bench.add(open_ended(str(i), range(100 * i + 2, 100 * i + 12), 35))
    for _ in range(3):  # admission counts the new one in full, so they come in one by one
        bench.step()
    assert bench.scheduler.num_running >= 2
    bench.drain()
    totals = bench.scheduler.totals
    assert 1 <= totals.retracted_total <= 3
    assert (totals.prompt_tokens_total, totals.finished_total, totals.generation_tokens_total) == (30, 3, 105)
    for i in range(3):
        assert bench.tokens(str(i)) == expected_tokens(range(100 * i + 2, 100 * i + 12), 35)


def test_the_one_of_lower_priority_gives_way() -> None:
    bench = Bench(100, chunk=64, eos_token_ids=(), schedule_conservativeness=0.0, policy="fcfs")
    bench.add(dataclasses.replace(open_ended("low", range(2, 12), 60), priority=-1))
    for _ in range(9):
        bench.step()
    bench.add(open_ended("normal", range(300, 310), 60))
    while not bench.scheduler.totals.retracted_total:
        bench.step()
    assert list(bench.scheduler._running) == ["normal"], "though it has fewer tokens to lose"
    bench.drain()
    assert bench.tokens("low") == expected_tokens(range(2, 12), 60)
    assert bench.tokens("normal") == expected_tokens(range(300, 310), 60)


def test_pool_64_and_one_request() -> None:
    """SCHED-10: a request above the pool is refused at the door; one as large as the pool, alone at the end, runs through."""
    bench = Bench(64, chunk=64, eos_token_ids=(), schedule_conservativeness=0.0)
    with pytest.raises(ContextLengthError):
        bench.add(open_ended("above", range(2, 12), 100))
    bench.add(open_ended("all of it", range(2, 12), 54), open_ended("other", range(500, 510), 54))
    bench.drain()
    assert bench.tokens("all of it") == expected_tokens(range(2, 12), 54)
    assert bench.tokens("other") == expected_tokens(range(500, 510), 54)


def step_without_recount(bench: Bench) -> None:
    bench.now += 1
    batch = bench.scheduler.schedule(bench.now)
    bench.outputs += bench.scheduler.update(bench.runner.execute(batch), bench.now) if batch else bench.scheduler.take_outputs()


def test_alone_and_without_a_page_it_ends_with_length() -> None:
    bench = Bench(100, chunk=64, eos_token_ids=())
    bench.add(open_ended("a", range(2, 12), 80))
    bench.step()
    while bench.cache.num_free_pages > 30:
        step_without_recount(bench)
    cache = bench.cache
    assert isinstance(cache, PrefixCache)
    cache._pool.allocate(20)  # by somebody who is no request, as nobody in production does today
    while bench.scheduler.has_work:
        step_without_recount(bench)
    final = bench.final("a")
    assert final.finish_reason is FinishReason.LENGTH
    assert 60 < final.num_output_tokens < 80
    assert bench.tokens("a") == expected_tokens(range(2, 12), 80)[: final.num_output_tokens]
    assert bench.scheduler.totals.pool_exhausted_total == 1
    assert bench.scheduler.totals.retracted_total == 0


def test_alone_and_without_a_page_for_its_prompt_it_ends_with_an_error() -> None:
    bench = Bench(100, chunk=8, eos_token_ids=())
    bench.add(open_ended("a", range(2, 62), 20))
    bench.step()
    cache = bench.cache
    assert isinstance(cache, PrefixCache)
    cache._pool.allocate(60)
    while bench.scheduler.has_work:
        step_without_recount(bench)
    final = bench.final("a")
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is not None
    assert (final.error.http_status, final.error.code) == (503, "pool_exhausted")


def test_without_retractions_all_output_is_reserved() -> None:
    bench = Bench(100, chunk=64, rows=8, eos_token_ids=(), schedule_conservativeness=0.0, max_retractions=0)
    for i in range(6):
        bench.add(open_ended(str(i), range(100 * i + 2, 100 * i + 12), 35))
    while bench.scheduler.has_work:
        bench.step()
        assert bench.scheduler.num_running <= 2
    assert bench.scheduler.totals.retracted_total == 0
    assert all(len(bench.tokens(str(i))) == 35 for i in range(6))


def test_a_burst_of_three_pools_and_one_of_512_with_a_shared_beginning() -> None:
    """SCHED-13, SCHED-14, SCHED-19: a shortage makes wait or retract; what was matched when it was planned is there when it is computed."""
    bench = Bench(128, chunk=32, rows=16, eos_token_ids=(), schedule_conservativeness=0.3)
    burst = [[*range(40 * i + 2, 40 * i + 34)] for i in range(12)]
    shared = [[*range(900, 930), 2 + i % 60, 2 + i // 60] for i in range(512)]
    for i, prompt in enumerate(burst + shared):
        bench.add(dataclasses.replace(open_ended(str(i), prompt, 1 + i % 9), priority=i % 3))
    bench.drain()
    for i, prompt in enumerate(burst + shared):
        assert bench.tokens(str(i)) == expected_tokens(prompt, 1 + i % 9)


work = st.lists(
    st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 2), st.booleans()),
    min_size=2,
    max_size=12,
)


@settings(max_examples=examples(80), deadline=None)
@given(
    work=work,
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([6, 11, 64]),
    is_shared=st.booleans(),
    max_retractions=st.integers(0, 3),
    conservativeness=st.sampled_from([0.0, 0.5, 1.0]),
    forced=st.sampled_from([None, 1, 3]),
    target=st.sampled_from([None, 500.0]),
    threshold=st.sampled_from([0, 1, 10]),
    seed=st.integers(0, 2**16),
)
def test_any_load_under_pressure(
    work: list[tuple[list[int], int, int, bool]],
    page_size: int,
    chunk: int,
    is_shared: bool,
    max_retractions: int,
    conservativeness: float,
    forced: int | None,
    target: float | None,
    threshold: int,
    seed: int,
) -> None:
    """Answers of each alone; bounded retractions; every row that is ready decodes or gave way; no step over its budget; each ends once."""
    bench = Bench(
        -(-64 // page_size),
        page_size,
        chunk,
        rows=6,
        is_shared=is_shared,
        eos_token_ids=(),
        forced=forced,
        max_retractions=max_retractions,
        schedule_conservativeness=conservativeness,
        target_step_ms=target,
        priority_scheduling_preemption_threshold=threshold,
    )
    rng = random.Random(seed)
    pending = list(enumerate(work))
    states: dict[str, RequestState] = {}
    aborted: set[str] = set()
    while pending or bench.scheduler.has_work:
        if pending and rng.random() < 0.6:
            number, (tokens, max_tokens, priority, is_scored) = pending.pop(0)
            sampling = {"logprobs": 0, "prompt_logprobs": 0} if is_scored else {}
            bench.add(dataclasses.replace(request(str(number), tokens, max_tokens, **sampling), priority=priority))  # type: ignore[arg-type]
        if rng.random() < 0.03:
            name = str(rng.randrange(len(work)))
            aborted.add(name)
            bench.scheduler.abort(name)
        states |= bench.scheduler._running
        ready = {name: (state, state.num_output) for name, state in bench.scheduler._running.items() if state.is_decoding}
        num_batches, marked = len(bench.batches), set(aborted)
        bench.step()
        assert not bench.scheduler.flush(bench.now) or not bench.scheduler.has_work
        for name, (state, num_output) in ready.items():
            gave_way = state.num_output_at_retraction == num_output
            assert state.num_output == num_output + 1 or gave_way or name in marked
        for batch in bench.batches[num_batches:]:
            assert 0 < batch.num_tokens <= chunk
            kinds = [row.is_decode for row in batch.rows]
            assert kinds == sorted(kinds, reverse=True)
            assert all(row.count > 0 for row in batch.rows)
    assert all(state.num_retractions <= max_retractions for state in states.values())
    assert bench.scheduler.totals.pool_exhausted_total == 0
    for number, (tokens, max_tokens, _, is_scored) in enumerate(work):
        name, expected = str(number), expected_tokens(tokens, max_tokens)
        final, got = bench.final(name), bench.tokens(name)
        assert got == expected[: len(got)]
        if final.finish_reason is FinishReason.ABORT:
            assert name in aborted
            continue
        assert got == expected
        if is_scored:
            assert [-one.logprob for one in bench.prompt_logprobs(name)] == list(range(1, len(tokens)))
            own = [-one.logprob for output in bench.outputs if output.request_id == name for one in output.logprobs]
            assert own == list(range(len(tokens), len(tokens) + max_tokens))
