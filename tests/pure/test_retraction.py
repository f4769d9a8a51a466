"""Retraction: a running request goes back to wait, its pages go into the tree, and its client sees nothing of it."""

import random

import pytest

from radixserve.core import FinishReason
from radixserve.scheduler.state import RequestState
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request


def retract(bench: Bench, request_id: str) -> RequestState:
    state = bench.scheduler._running[request_id]
    bench.scheduler._retractions.retract(state, bench.now)
    bench.scheduler.check_account()
    return state


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_shared", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("steps", range(1, 12))
def test_retracted_at_any_moment_the_answer_is_the_same(steps: int, page_size: int, is_shared: bool) -> None:
    """SCHED-01: after chunk 1, chunk 2, the first token, and each later one; each token and log-probability is sent once."""
    bench = Bench(num_pages=400 // page_size, page_size=page_size, chunk=16, is_shared=is_shared)
    prompt = range(2, 45)
    bench.add(request("a", prompt, max_tokens=9, logprobs=0, prompt_logprobs=0, ignore_eos=True))
    for _ in range(steps):
        bench.step()
    sent = bench.tokens("a")
    computed = bench.runner.num_computed
    held = retract(bench, "a").num_output if not bench.final_or_none("a") else 9
    bench.drain()
    assert bench.tokens("a")[: len(sent)] == sent
    assert bench.tokens("a") == expected_tokens(prompt, 9)
    assert [-one.logprob for output in bench.outputs for one in output.logprobs] == list(range(43, 52))
    assert [-one.logprob for one in bench.prompt_logprobs("a")] == list(range(1, 43))
    totals = bench.scheduler.totals
    assert (totals.retracted_total, totals.prompt_tokens_total, totals.cached_tokens_total) == (int(held < 9), 43, 0)
    assert bench.final("a").num_cached_tokens == 0
    if is_shared and held < 9 and not 0 < computed < 43:
        assert bench.runner.num_computed <= 43 + 8 + page_size, "it resumes as a hit: at most a page is computed again"


def test_a_chunk_that_leaves_one_known_token_is_no_decode_row() -> None:
    """The runner forgot the last token with the slot: it must be told, also where a chunk ends right before it."""
    bench = Bench(num_pages=100, chunk=8, is_shared=False)
    bench.add(request("a", range(2, 10), max_tokens=12, ignore_eos=True))
    while len(bench.tokens("a")) < 9:
        bench.step()
    retract(bench, "a")
    bench.drain()
    assert bench.tokens("a") == expected_tokens(range(2, 10), 12)


def test_a_retracted_request_keeps_its_place() -> None:
    bench = Bench(rows=1, policy="fcfs")
    bench.add(request("a", range(2, 10), max_tokens=5, ignore_eos=True), request("b", range(50, 60), max_tokens=5, ignore_eos=True))
    bench.step()
    bench.step()
    retract(bench, "a")
    head = bench.scheduler._waiting.head()
    assert head is not None
    assert head.request.request_id == "a"
    bench.drain()
    assert [output.request_id for output in bench.outputs if output.is_final] == ["a", "b"]


def test_stop_abort_and_timeouts_while_retracted() -> None:
    bench = Bench(rows=1, policy="fcfs", queue_timeout_s=20.0)
    for name in ("stopped", "aborted", "goes on"):
        bench.add(request(name, [*range(2, 20), ord(name[0])], max_tokens=60, ignore_eos=True))
        while len(bench.tokens(name)) < 8:
            bench.step()
        retract(bench, name)
        if name == "stopped":
            bench.scheduler.finish(name, 5)
            bench.step()
            final = bench.final(name)
            assert (final.finish_reason, final.num_output_tokens) == (FinishReason.STOP, 5)
        elif name == "aborted":
            bench.scheduler.abort(name)
            bench.step()
            assert bench.final(name).finish_reason is FinishReason.ABORT
    assert not bench.scheduler._running and bench.scheduler.num_waiting == 1
    bench.now += 30.0
    bench.drain()
    assert bench.final("goes on").finish_reason is FinishReason.LENGTH, "a stream that was retracted is past the queue's time limit"
    assert bench.tokens("goes on") == expected_tokens([*range(2, 20), ord("g")], 60)


@pytest.mark.parametrize("seed", range(20))
def test_random_retractions(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    bench = Bench(96 // page_size, page_size, chunk=rng.choice([8, 24]), rows=6, is_shared=rng.random() < 0.7)
    prompts = [[rng.randrange(2, 4) for _ in range(rng.randrange(1, 40))] for _ in range(15)]
    bench.add(*(request(str(i), prompt, max_tokens=1 + i, ignore_eos=True) for i, prompt in enumerate(prompts)))
    while bench.scheduler.has_work:
        bench.step()
        if bench.scheduler._running and rng.random() < 0.3:
            retract(bench, rng.choice(list(bench.scheduler._running)))
    for i, prompt in enumerate(prompts):
        assert bench.tokens(str(i)) == expected_tokens(prompt, 1 + i)
    assert bench.scheduler.totals.prompt_tokens_total == sum(map(len, prompts))
