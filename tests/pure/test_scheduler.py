"""The scheduler over real tree and pool, with a runner whose answers depend on every page: any wrong page id gives another token."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.core import FinishReason, Namespace
from radixserve.errors import ContextLengthError, InvalidRequestError
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request
from tests.support.examples import examples


def test_one_request_is_chunked_then_decoded() -> None:
    bench = Bench(chunk=16)
    bench.add(request("a", range(2, 42), max_tokens=3, ignore_eos=True))
    bench.drain()
    shape = [
        (row.start, row.count, len(row.token_ids), int(row.is_sampled), row.output_index) for batch in bench.batches for row in batch.rows
    ]
    assert shape == [(0, 16, 16, 0, 0), (16, 16, 16, 0, 0), (32, 8, 8, 1, 0), (40, 1, 0, 1, 1), (41, 1, 0, 1, 2)]
    assert bench.tokens("a") == expected_tokens(range(2, 42), 3)
    assert bench.final("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_next_turn_reuses_the_answer_too(page_size: int) -> None:
    """TREE-27: filed are prompt and output, less the last sampled token, whose K and V were never computed."""
    bench = Bench(page_size=page_size, num_pages=600 // page_size)
    prompt = list(range(2, 102))
    bench.add(request("one", prompt, max_tokens=50, ignore_eos=True))
    bench.drain()
    turn = prompt + bench.tokens("one")
    bench.add(request("two", [*turn, *range(500, 550)], max_tokens=1))
    bench.drain()
    assert bench.final("two").num_cached_tokens == 149 // page_size * page_size


def test_decode_rows_come_first_and_share_the_budget_with_chunks() -> None:
    bench = Bench(chunk=8, rows=4)
    bench.add(request("a", [2, 3], max_tokens=20, ignore_eos=True))
    bench.step()
    bench.add(request("b", range(100, 130), max_tokens=2, ignore_eos=True))
    bench.step()
    decode, chunk = bench.batches[-1].rows
    assert (decode.is_decode, decode.count, chunk.is_decode, chunk.count) == (True, 1, False, 7)
    bench.drain()
    assert bench.tokens("a") == expected_tokens([2, 3], 20)
    assert bench.tokens("b") == expected_tokens(range(100, 130), 2)


def test_longest_cached_prefix_first() -> None:
    def order(policy: str) -> list[str]:
        bench = Bench(rows=1, policy=policy)
        bench.add(request("warm", range(2, 32), max_tokens=1))
        bench.drain()
        bench.add(request("cold", range(500, 530), max_tokens=1))
        bench.add(request("short", [*range(2, 12), 900], max_tokens=1))
        bench.add(request("long", [*range(2, 30), 901], max_tokens=1))
        bench.drain()
        return [output.request_id for output in bench.outputs if output.is_final][1:]

    assert order("lpm") == ["long", "short", "cold"]
    assert order("fcfs") == ["cold", "short", "long"]


def test_cached_tokens_are_counted_once_in_admission() -> None:
    """SCHED-27: pool of 20 pages, 12 locked by a runner; a request of 16 that shares them needs 4."""
    bench = Bench(num_pages=20, chunk=64)
    bench.add(request("holder", range(2, 14), max_tokens=4, ignore_eos=True))
    bench.step()
    bench.add(request("sharer", [*range(2, 14), 90, 91, 92], max_tokens=2, ignore_eos=True))
    bench.step()
    assert bench.scheduler.num_running == 2
    bench.drain()
    assert bench.final("sharer").num_cached_tokens == 12
    assert bench.tokens("sharer") == expected_tokens([*range(2, 14), 90, 91, 92], 2)


def test_a_full_cache_does_not_block_admission() -> None:
    """SCHED-26, MEM-03, MEM-09: evictable counts as available, up to the largest legal request."""
    bench = Bench(num_pages=50)
    for i in range(10):
        bench.add(request(f"fill-{i}", range(100 * i + 2, 100 * i + 22), max_tokens=1))
        bench.drain()
    bench.add(request("big", range(2000, 2049), max_tokens=1))
    bench.drain()
    assert bench.tokens("big") == expected_tokens(range(2000, 2049), 1)


def test_a_failed_admission_leaves_no_trace() -> None:
    """TREE-03, METRIC-02."""
    bench = Bench(num_pages=40)
    bench.add(request("warm", range(2, 12), max_tokens=1))
    bench.drain()
    bench.add(request("holder", range(500, 520), max_tokens=15, ignore_eos=True))
    bench.step()
    bench.step()
    before = dataclasses.replace(bench.scheduler.totals)
    bench.add(request("waits", [*range(2, 12), *range(700, 710)], max_tokens=10, ignore_eos=True))
    num_failed = 0
    while bench.scheduler.num_running:
        available = bench.cache.num_free_pages + bench.cache.num_evictable_pages
        bench.step()
        if bench.final_or_none("holder"):
            break
        num_failed += 1
        left = bench.cache.num_free_pages + bench.cache.num_evictable_pages
        assert left == available - 1, "the holder's next token takes a page, and nothing else does"
        assert bench.cache.tree.root.lock_ref == 1  # type: ignore[attr-defined]
        assert bench.scheduler.totals.prompt_tokens_total == before.prompt_tokens_total
        assert bench.scheduler.totals.cached_tokens_total == before.cached_tokens_total
    assert num_failed > 5
    bench.drain()
    assert bench.tokens("waits") == expected_tokens([*range(2, 12), *range(700, 710)], 10)
    assert bench.scheduler.totals.prompt_tokens_total == before.prompt_tokens_total + 20


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_length_around_the_pool_is_served_or_refused(page_size: int) -> None:
    """SCHED-04, MEM-04, API-19: none hangs, and refused ones leave nothing behind."""
    num_pages = 96 // page_size
    bench = Bench(num_pages=num_pages, page_size=page_size, chunk=64)
    served, refused = 0, 0
    for length in range(96 - 2 * page_size - 1, 96 + page_size + 2):
        one = request(f"r{length}", range(2, 2 + length), max_tokens=1)
        if length + 1 > num_pages * page_size:
            with pytest.raises(ContextLengthError, match=rf"requested {length + 1} tokens \({length} in the prompt, 1 in the completion"):
                bench.add(one)
            refused += 1
        else:
            bench.add(one)
            bench.drain()
            assert bench.tokens(f"r{length}") == expected_tokens(range(2, 2 + length), 1)
            served += 1
    assert served >= 2 * page_size
    assert refused >= page_size
    assert bench.cache.num_free_pages + bench.cache.num_evictable_pages == num_pages


def test_what_cannot_be_served_is_refused_at_the_door() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError, match="at least one token"):
        bench.add(request("empty", []))
    with pytest.raises(ContextLengthError, match=r"maximum context length .* is 200 tokens"):
        bench.add(request("long", range(150), max_tokens=60))
    bench.add(request("twin", [5]))
    with pytest.raises(InvalidRequestError, match="in use"):
        bench.add(request("twin", [6]))
    bench.drain()


def test_eos_and_stop_tokens_end_a_request() -> None:
    prompt = next(p for p in ([3, n] for n in range(5000)) if 1 in expected_tokens(p, 40)[2:])
    answer = expected_tokens(prompt, 40)
    at = answer.index(1)
    bench = Bench()
    bench.add(request("eos", prompt, max_tokens=40), request("ignores", prompt, max_tokens=40, ignore_eos=True))
    bench.add(request("stop", prompt, max_tokens=40, stop_token_ids=(answer[1],)))
    bench.drain()
    assert bench.tokens("eos") == answer[: at + 1]
    assert (bench.final("eos").finish_reason, bench.final("eos").stop_token_id) == (FinishReason.STOP, 1)
    assert bench.tokens("ignores") == answer
    assert bench.tokens("stop") == answer[: answer.index(answer[1]) + 1]


def test_a_stop_string_cuts_usage_and_tree() -> None:
    bench = Bench()
    bench.add(request("a", range(2, 12), max_tokens=50, ignore_eos=True))
    while len(bench.tokens("a")) < 10:
        bench.step()
    bench.scheduler.finish("a", 6)
    bench.drain()
    final = bench.final("a")
    assert (final.finish_reason, final.num_output_tokens, final.token_ids) == (FinishReason.STOP, 6, ())
    kept = [*range(2, 12), *expected_tokens(range(2, 12), 10)]
    assert bench.cache.match(Namespace(), request("x", [*kept, 5]).prompt_ids, 10**6).num_tokens == 16


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("page_size", [1, 16])
def test_abort_anywhere(steps: int, page_size: int) -> None:
    """ABORT-02, ABORT-06, TREE-16: queued, chunk 1, chunk 2, first token, decode; the next equal prompt gets the cold answer."""
    bench = Bench(num_pages=400 // page_size, page_size=page_size, chunk=16)
    prompt = range(2, 52)
    bench.add(request("a", prompt, max_tokens=30, ignore_eos=True))
    for _ in range(steps):
        bench.step()
    computed = bench.runner.num_computed
    bench.scheduler.abort("a")
    bench.drain()
    assert bench.final("a").finish_reason is FinishReason.ABORT
    assert bench.runner.num_computed == computed, "nothing is computed for a request that was aborted"
    assert bench.cache.num_free_pages + bench.cache.num_evictable_pages == bench.cache.num_pages
    bench.add(request("again", prompt, max_tokens=8, ignore_eos=True))
    bench.drain()
    assert bench.tokens("again") == expected_tokens(prompt, 8)


def test_abort_and_finish_of_unknown_requests_are_fine() -> None:
    bench = Bench()
    bench.scheduler.abort("nobody")
    bench.scheduler.finish("nobody", 3)
    bench.drain()
    assert bench.outputs == []


def test_a_mark_of_an_unknown_request_does_not_meet_a_later_one() -> None:
    bench = Bench()
    bench.scheduler.abort("a")
    bench.scheduler.finish("a", 1)
    bench.add(request("a", [5, 6], max_tokens=3, ignore_eos=True))
    bench.drain()
    assert bench.tokens("a") == expected_tokens([5, 6], 3)


def test_a_blocked_queue_is_not_looked_at_again_until_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pool: each decode step evicts, and 50 waiting requests must not be matched anew each time."""
    bench = Bench(num_pages=100, rows=4)
    for i in range(4):
        bench.add(request(f"fill-{i}", range(100 * i + 2, 100 * i + 22), max_tokens=1))
        bench.drain()
    bench.add(request("holder", range(1000, 1010), max_tokens=80, ignore_eos=True))
    bench.step()
    for i in range(50):
        bench.add(request(f"w{i}", range(2000 + 20 * i, 2020 + 20 * i), max_tokens=2, ignore_eos=True))
    bench.step()
    num_matches = 0
    plain_match = PrefixCache.match

    def counting_match(self: PrefixCache, *args: Any) -> Any:
        nonlocal num_matches
        num_matches += 1
        return plain_match(self, *args)

    monkeypatch.setattr(PrefixCache, "match", counting_match)
    while bench.scheduler.num_running == 1 and bench.scheduler.num_waiting == 50:
        bench.step()
    num_steps = len(bench.batches)
    assert num_steps > 60
    assert num_matches <= 51 + 4, "once over the queue when the holder ends, and once per admission"
    bench.drain()
    for i in range(50):
        assert bench.tokens(f"w{i}") == expected_tokens(range(2000 + 20 * i, 2020 + 20 * i), 2)


def test_flush_waits_for_idle() -> None:
    """ABORT-07, ABORT-08."""
    bench = Bench()
    for i in range(5):
        bench.add(request(f"a{i}", range(2, 30), max_tokens=3))
        assert not bench.scheduler.flush(bench.now)
        bench.step()
        assert not bench.scheduler.flush(bench.now)
        bench.drain()
        assert bench.scheduler.flush(bench.now)
        assert bench.final(f"a{i}").num_cached_tokens == 0


def test_a_scattered_pool() -> None:
    """TREE-25: after hits and evictions page ids are anything but consecutive."""
    bench = Bench(num_pages=64)
    for i in range(30):
        bench.add(request(f"a{i}", [*range(2, 2 + i), 300 + i, *range(600 + i, 620 + i)], max_tokens=4, ignore_eos=True))
    bench.drain()
    for i in range(30):
        assert bench.tokens(f"a{i}") == expected_tokens([*range(2, 2 + i), 300 + i, *range(600 + i, 620 + i)], 4)


prompts = st.lists(
    st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=40), st.integers(1, 12), st.sampled_from(["", "x"])), min_size=1, max_size=12
)


@settings(max_examples=examples(80), deadline=None)
@given(
    work=prompts,
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([4, 7, 64]),
    is_shared=st.booleans(),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight", "cost"]),
    seed=st.integers(0, 2**16),
)
def test_any_load_gives_the_answers_of_each_request_alone(
    work: list[tuple[list[int], int, str]], page_size: int, chunk: int, is_shared: bool, policy: str, seed: int
) -> None:
    """Random arrivals and aborts, a pool so small that it always evicts, 4 rows: hit equals miss, each ends once, no budget is broken."""
    bench = Bench(num_pages=-(-64 // page_size), page_size=page_size, chunk=chunk, rows=4, policy=policy, is_shared=is_shared)
    rng = random.Random(seed)
    waiting = list(enumerate(work))
    aborted: set[str] = set()
    stopped: dict[str, int] = {}
    while waiting or bench.scheduler.has_work:
        if waiting and rng.random() < 0.5:
            number, (tokens, max_tokens, salt) = waiting.pop(0)
            bench.add(request(str(number), tokens, max_tokens, Namespace(cache_salt=salt), ignore_eos=True))
        chosen = str(rng.randrange(len(work)))
        if rng.random() < 0.05:
            aborted.add(chosen)
            bench.scheduler.abort(chosen)
        elif rng.random() < 0.05 and chosen not in stopped and bench.tokens(chosen):
            stopped[chosen] = rng.randrange(1, len(bench.tokens(chosen)) + 1)
            bench.scheduler.finish(chosen, stopped[chosen])
        bench.step()
    for batch in bench.batches:
        assert 0 < batch.num_tokens <= chunk
        kinds = [row.is_decode for row in batch.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        assert all(row.count > 0 for row in batch.rows), "no empty row (SCHED-12, SCHED-20)"
    for number, (tokens, max_tokens, _) in enumerate(work):
        final = bench.final(str(number))
        expected = expected_tokens(tokens, max_tokens)
        got = bench.tokens(str(number))
        assert got == expected[: len(got)]
        assert 0 <= final.num_cached_tokens < len(tokens)
        if final.finish_reason is FinishReason.ABORT:
            assert str(number) in aborted
        elif final.finish_reason is FinishReason.STOP:
            assert final.num_output_tokens == stopped[str(number)]
        else:
            assert got == expected


def test_no_row_that_is_ready_to_decode_is_left_out() -> None:
    bench = Bench(chunk=8, rows=6)
    for i in range(6):
        bench.add(request(f"a{i}", range(10 * i + 2, 10 * i + 9), max_tokens=10, ignore_eos=True))
    ready: set[int] = set()
    while bench.scheduler.has_work:
        bench.step()
        batch = bench.batches[-1]
        slots = {row.slot for row in batch.rows if row.is_decode}
        assert ready <= slots
        finished = _finished_slots(bench)
        ready = {row.slot for row in batch.rows if row.is_sampled} - finished


def _finished_slots(bench: Bench) -> set[int]:
    return set(bench.scheduler._running._freed_slots)


def test_one_that_did_not_fit_is_not_taken_for_the_next_head() -> None:
    """The head's long match is evicted while it does not fit: another one is the head then, and fits, though no page became free."""
    bench = Bench(num_pages=100, rows=4, chunk=128)
    bench.add(request("warm", range(300, 340), max_tokens=1))
    bench.drain()
    bench.add(request("runs", range(2, 22), max_tokens=75, ignore_eos=True))
    bench.step()
    bench.add(request("small", [*range(2, 22), 9], max_tokens=1))
    bench.add(request("big", [*range(300, 340), 3, 4, 5, 6, 7], max_tokens=1))
    bench.step()
    assert bench.scheduler.num_running == 1, "the one with the longer match comes first, and does not fit"
    bench.drain()
    assert [output.request_id for output in bench.outputs if output.is_final][1:] == ["small", "runs", "big"]
