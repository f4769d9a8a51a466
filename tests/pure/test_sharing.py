"""In-flight sharing: what is being computed right now is waited for, not computed again; and nobody waits for ever."""

import dataclasses
import gc
import random

import pytest

from radixserve.config import SchedulerConfig
from radixserve.core import BASE_NAMESPACE, FinishReason, Namespace
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, ints, request


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight", "cost"])
def test_sixteen_equal_prompts_compute_one_prompt_and_sixteen_tails(page_size: int, policy: str) -> None:
    bench = Bench(num_pages=4096 // page_size, page_size=page_size, chunk=32, rows=16, policy=policy)
    prompt = list(range(2, 202))
    for i in range(16):
        # four choices each of a batch of four: requests like any others
        one = request(f"{i // 4}-{i % 4}", prompt, max_tokens=3, ignore_eos=True)
        bench.add(dataclasses.replace(one, choice_index=i % 4))
    bench.drain()
    tail = len(prompt) - (len(prompt) - 1) // page_size * page_size
    assert bench.scheduler.totals.prefill_tokens_total == len(prompt) + 15 * tail
    for i in range(16):
        assert bench.tokens(f"{i // 4}-{i % 4}") == expected_tokens(prompt, 3)


def test_followers_part_from_their_leader_where_the_prompts_do() -> None:
    bench = Bench(num_pages=2000, chunk=16, rows=8)
    shared = list(range(2, 82))
    for i in range(8):
        bench.add(request(f"a{i}", [*shared, *range(500 + 30 * i, 520 + 30 * i)], max_tokens=2, ignore_eos=True))
    bench.drain()
    assert bench.scheduler.totals.prefill_tokens_total == 80 + 8 * 20
    for i in range(8):
        assert bench.tokens(f"a{i}") == expected_tokens([*shared, *range(500 + 30 * i, 520 + 30 * i)], 2)


def test_a_stranger_does_not_wait_behind_followers() -> None:
    bench = Bench(num_pages=2000, chunk=16, rows=8, policy="fcfs")
    bench.add(request("leader", range(2, 66), max_tokens=1), request("follower", range(2, 66), max_tokens=1))
    bench.add(request("stranger", range(700, 708), max_tokens=1))
    bench.step()
    assert bench.scheduler.num_running == 1, "the leader takes the whole budget"
    for _ in range(3):
        bench.step()
    assert bench.scheduler.num_waiting == 2, "the leader needs four whole steps"
    bench.step()
    assert not bench.scheduler.has_work
    assert bench.tokens("stranger") == expected_tokens(range(700, 708), 1)


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    bench = Bench(num_pages=2000, chunk=16, rows=4)
    prompt = list(range(2, 130))
    bench.add(*(request(f"a{i}", prompt, max_tokens=2, ignore_eos=True) for i in range(4)))
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.scheduler.abort("a0")
    bench.drain()
    assert bench.final("a0").finish_reason is FinishReason.ABORT
    assert bench.scheduler.totals.prefill_tokens_total == len(prompt) + 2, "two chunks of the leader were of use"
    for i in (1, 2, 3):
        assert bench.tokens(f"a{i}") == expected_tokens(prompt, 2)


def test_followers_go_on_when_their_leader_is_retracted() -> None:
    bench = Bench(num_pages=2000, chunk=16, rows=4)
    prompt = list(range(2, 130))
    bench.add(*(request(f"a{i}", prompt, max_tokens=2, ignore_eos=True) for i in range(4)))
    bench.step()
    bench.step()
    bench.scheduler._retractions.retract(bench.scheduler._running["a0"], bench.now)
    bench.drain()
    assert bench.scheduler.totals.prefill_tokens_total == len(prompt) + 3, "the first to be admitted again leads the others"
    for i in range(4):
        assert bench.tokens(f"a{i}") == expected_tokens(prompt, 2)


def test_a_leader_that_times_out_frees_its_followers() -> None:
    bench = Bench(num_pages=2000, chunk=4, rows=4, request_timeout_s=10.0)
    prompt = list(range(2, 66))
    bench.add(request("leader", prompt, max_tokens=1))
    for _ in range(9):
        bench.step()
    bench.add(request("follower", prompt, max_tokens=1))
    bench.drain()
    assert bench.final("leader").finish_reason is FinishReason.ERROR
    assert bench.tokens("follower") == expected_tokens(prompt, 1)
    assert bench.scheduler.totals.prefill_tokens_total == 64


def test_nobody_waits_across_namespaces_or_without_a_tree() -> None:
    prompt = list(range(2, 34))
    bench = Bench(num_pages=500, chunk=64, rows=4)
    bench.add(request("a", prompt, max_tokens=1), request("b", prompt, max_tokens=1, namespace=Namespace(cache_salt="b")))
    bench.step()
    assert len(bench.batches[0].rows) == 2
    bench = Bench(num_pages=500, chunk=64, rows=4, is_shared=False)
    bench.add(request("a", prompt, max_tokens=1), request("b", prompt, max_tokens=1))
    bench.step()
    assert len(bench.batches[0].rows) == 2


def test_a_prompt_that_is_scored_computes_itself() -> None:
    """Its logits are wanted from the start on, so nothing that a leader computes is of use."""
    prompt = list(range(2, 34))
    bench = Bench(num_pages=500, chunk=64, rows=4)
    bench.add(request("a", prompt, max_tokens=1), request("b", prompt, max_tokens=1, prompt_logprobs=0))
    bench.step()
    assert len(bench.batches[0].rows) == 2


@pytest.mark.parametrize("start", [0, 1, 5, 20, 39, 40, 60])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_cold_and_warm(start: int, is_warm: bool, max_tokens: int) -> None:
    """USAGE-01, USAGE-02, USAGE-04: one entry for each position from `start` on, whatever is cached and however it is chunked."""
    bench = Bench(num_pages=200, chunk=16, page_size=4)
    prompt = list(range(2, 42))
    if is_warm:
        bench.add(request("before", prompt, max_tokens=1))
        bench.drain()
    bench.add(request("a", prompt, max_tokens, prompt_logprobs=0, prompt_logprobs_start=start, logprobs=0, ignore_eos=True))
    bench.drain()
    first = max(1, start)
    assert [(one.token_id, -one.logprob) for one in bench.prompt_logprobs("a")] == [(prompt[p], p) for p in range(first, 40)]
    assert bench.tokens("a") == expected_tokens(prompt, max_tokens)
    own = [one for output in bench.outputs if output.request_id == "a" for one in output.logprobs]
    assert [(one.token_id, -one.logprob) for one in own] == list(zip(bench.tokens("a"), (40, 41), strict=False))
    assert bench.final("a").finish_reason is FinishReason.LENGTH
    assert bench.final("a").num_cached_tokens == (min(first - 1, 39) // 4 * 4 if is_warm else 0)


def test_a_prompt_without_output_is_cached_whole() -> None:
    bench = Bench(num_pages=200)
    bench.add(request("warm-up", range(2, 42), max_tokens=0))
    bench.drain()
    assert (bench.tokens("warm-up"), bench.final("warm-up").num_output_tokens) == ([], 0)
    bench.add(request("real", [*range(2, 42), 7], max_tokens=1))
    bench.drain()
    assert bench.final("real").num_cached_tokens == 40


def test_random_families_of_prompts() -> None:
    """Trees of prompts, arriving at random: right answers, and no prefix computed twice but for what was evicted or rounded."""
    for seed in range(30):
        rng = random.Random(seed)
        bench = Bench(num_pages=4000, chunk=rng.choice([8, 24, 64]), rows=8, policy=rng.choice(["lpm", "fcfs", "dfs-weight", "cost"]))
        prompts: list[list[int]] = [[rng.randrange(2, 900) for _ in range(30)]]
        for _ in range(20):
            parent = rng.choice(prompts)
            prompts.append([*parent[: rng.randrange(1, len(parent) + 1)], *(rng.randrange(2, 900) for _ in range(rng.randrange(1, 30)))])
        order = list(enumerate(prompts))
        rng.shuffle(order)
        while order or bench.scheduler.has_work:
            if order and rng.random() < 0.6:
                number, prompt = order.pop()
                bench.add(request(str(number), prompt, max_tokens=2, ignore_eos=True))
            bench.step()
        distinct = {tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))}
        assert bench.scheduler.totals.prefill_tokens_total <= len(distinct) + len(prompts)
        for number, prompt in enumerate(prompts):
            assert bench.tokens(str(number)) == expected_tokens(prompt, 2)


def test_an_overdue_follower_does_not_keep_its_leader() -> None:
    cache = PrefixCache(1000)
    queue = WaitingQueue(SchedulerConfig(lpm_max_overtaken=1), cache)
    prompt = list(range(2, 34))
    follower, stranger = (RequestState(request(f"keeper-{i}", prompt if i == 1 else [500, i]), 0.0, 40, i) for i in (1, 2))
    leader = RequestState(request("kept", prompt), 0.0, 40, 3)
    queue.add(follower)
    queue.add(stranger)
    queue.start_pass([leader])
    assert queue.head() is stranger
    queue.admitted(stranger)
    queue.start_pass([leader])
    assert queue.head() is None and follower.leader == leader.arrival
    del leader
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, RequestState) and one.request.request_id == "kept"]
    queue.start_pass(())
    assert queue.head() is follower
    queue.admitted(follower)
    assert follower.leader is None


def test_a_mark_goes_up_when_an_admission_evicts_what_its_followers_match() -> None:
    """Others computed further than the leader holds; what is evicted again the leader computes too, so nobody else should."""
    cache = PrefixCache(50)
    queue = WaitingQueue(SchedulerConfig(schedule_policy="fcfs"), cache)
    document = list(range(2, 12))
    path = cache.lock(cache.match(BASE_NAMESPACE, ints(document), 0), 0.0)
    cache.reserve(path, 6, 0.0)
    cache.release(path, ints(document[:6]), 6, 0.0)
    leader = RequestState(request("leader", document), 0.0, 20, 1)
    cache.lock(cache.match(BASE_NAMESPACE, leader.token_ids, 2), 0.0)
    leader.num_computed = 2
    for number, tokens in enumerate([[*document, 50], [*document[:4], 60, 61], [70, 71]], 2):
        queue.add(RequestState(request(str(number), tokens), 0.0, 20, number))
    queue.start_pass([leader])
    head = queue.head()
    assert head is not None and head.request.request_id == "3", "what it goes on with is cached, and nobody computes it"
    cache.make_room(cache.num_free_pages + 3, 1.0)
    head = queue.head()
    assert head is not None and head.request.request_id == "4"
    queue.start_pass(())
    head = queue.head()
    assert head is not None and head.request.request_id == "2"
