"""A step planned before the one under way is answered: every answer, count and page is what it is one step after the other."""

import random

import pytest

from radixserve.core import FinishReason, Request
from radixserve.scheduler.state import UNKNOWN
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request

EOS = frozenset(range(40))  # of 1000 tokens: one in 25 ends its request


def expected_answer(one: Request) -> tuple[list[int], FinishReason]:
    tokens = expected_tokens(one.prompt_ids, one.sampling.max_tokens)
    end = next((i for i, token in enumerate(tokens) if token in EOS and not one.sampling.ignore_eos), None)
    return (tokens, FinishReason.LENGTH) if end is None else (tokens[: end + 1], FinishReason.STOP)


def random_requests(rng: random.Random, num_requests: int) -> list[Request]:
    """Prompts that share beginnings, some of them equal; most end early, some at once, some want no token."""
    documents = [[rng.randrange(1000) for _ in range(60)] for _ in range(3)]
    requests = []
    for number in range(num_requests):
        prompt = rng.choice(documents)[: rng.randrange(1, 60)] + [rng.randrange(1000) for _ in range(rng.choice((0, 1, 9)))]
        max_tokens = rng.choice((0, 1, 2, 3, 20, 60))
        sampling: dict[str, object] = {"ignore_eos": rng.random() < 0.3}
        if rng.random() < 0.2:
            sampling["prompt_logprobs"] = 0
        made = request(f"r{number}", prompt, max_tokens, **sampling)
        requests.append(Request(made.request_id, made.prompt_ids, made.sampling, priority=rng.choice((0, 0, 0, 4, 40))))
    return requests


class Clients:
    """Requests that come bit by bit; some are aborted, some end at a stop string that is found in what was sent."""

    def __init__(self, bench: Bench, rng: random.Random, requests: list[Request]) -> None:
        self.bench, self.rng = bench, rng
        self.waiting = list(requests)
        self.open: dict[str, Request] = {}
        self.stopped_at: dict[str, int] = {}
        self.aborted: set[str] = set()

    def run(self) -> None:
        for _ in range(5000):
            if not (self.waiting or self.bench.scheduler.has_work):
                return
            while self.waiting and self.rng.random() < 0.5:
                one = self.waiting.pop()
                self.open[one.request_id] = one
                self.bench.add(one)
            for name in list(self.open):
                if self.rng.random() < 0.01:
                    self.aborted.add(name)
                    self.bench.scheduler.abort(name)
            for output in self.bench.step():
                assert UNKNOWN not in output.token_ids
                if output.is_final:
                    del self.open[output.request_id]
                elif output.num_output_tokens > 2 and output.request_id not in self.stopped_at and self.rng.random() < 0.03:
                    self.stopped_at[output.request_id] = output.num_output_tokens - self.rng.randrange(2)
                    self.bench.scheduler.finish(output.request_id, self.stopped_at[output.request_id])
        raise AssertionError("the scheduler does not come to an end")

    def check(self, one: Request) -> None:
        name, bench = one.request_id, self.bench
        tokens, final = bench.tokens(name), bench.final(name)
        expected, reason = expected_answer(one)
        if final.finish_reason is FinishReason.ABORT:
            assert name in self.aborted
            assert tokens == expected[: len(tokens)] and final.num_output_tokens == len(tokens)
        elif final.stop_token_id is None and final.finish_reason is FinishReason.STOP:
            assert tokens == expected[: len(tokens)] and final.num_output_tokens == self.stopped_at[name]
        else:
            assert (tokens, final.finish_reason, final.num_output_tokens) == (expected, reason, len(expected))
            if one.sampling.prompt_logprobs is not None:
                assert [entry.token_id for entry in bench.prompt_logprobs(name)] == list(one.prompt_ids[1:])


@pytest.mark.parametrize("forced", [None, 3, 7])
@pytest.mark.parametrize("is_shared", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_workloads(page_size: int, is_shared: bool, forced: int | None) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        num_pages = -(-rng.choice((170, 300, 2000)) // page_size)
        bench = Bench(
            num_pages,
            page_size,
            chunk=rng.choice((9, 16, 64)),
            is_shared=is_shared,
            eos_token_ids=tuple(EOS),
            forced=forced,
            plans_ahead=True,
            policy=rng.choice(("lpm", "fcfs", "dfs-weight")),
            schedule_conservativeness=rng.choice((0.0, 1.0)),
            priority_scheduling_preemption_threshold=3,
        )
        requests = random_requests(rng, 50)
        clients = Clients(bench, rng, requests)
        clients.run()
        for one in requests:
            clients.check(one)
        totals = bench.scheduler.totals
        assert totals.generation_tokens_total == sum(len(bench.tokens(one.request_id)) for one in requests)
        assert totals.requests_total == totals.finished_total + totals.aborted_total == len(requests)
        assert bench.num_planned_ahead > len(bench.batches) // 4
        bench.scheduler.check_account()
        assert bench.cache.num_locked_pages == 0
        assert bench.scheduler.flush(bench.now) and bench.cache.num_free_pages == num_pages


def ahead(**options: object) -> Bench:
    return Bench(plans_ahead=True, **options)  # type: ignore[arg-type]


def test_a_row_of_one_that_ended_is_thrown_away_and_its_page_held() -> None:
    prompt = list(range(100, 108))
    tokens = expected_tokens(prompt, 3)
    bench = ahead(page_size=4, eos_token_ids=(tokens[1],))
    bench.add(request("a", prompt, 20))
    bench.step()
    assert [len(batch.rows) for batch in bench.batches] == [1, 1]
    (final,) = bench.step()  # the answer to the second step, when the third is planned
    assert (final.token_ids, final.finish_reason, final.num_output_tokens) == ((tokens[1],), FinishReason.STOP, 2)
    assert len(bench.batches) == 3 and bench.batches[2].rows[0].output_index == 2
    assert bench.scheduler.num_running == 0 and bench.scheduler.has_work
    assert bench.cache.num_locked_pages == 2 and bench.cache.num_free_pages == 200 - 3
    assert not bench.scheduler.flush(bench.now), "a flush would free what is written to"
    assert bench.step() == []
    assert not bench.scheduler.has_work
    assert bench.cache.num_locked_pages == 0 and bench.cache.num_evictable_pages == 2
    assert bench.scheduler.totals.generation_tokens_total == 2


def test_the_id_of_one_that_ended_may_be_used_again_at_once() -> None:
    prompt = list(range(100, 108))
    bench = ahead(eos_token_ids=(expected_tokens(prompt, 2)[1],))
    bench.add(request("a", prompt, 20))
    while not bench.final_or_none("a"):
        bench.step()
    bench.add(request("a", range(300, 310), 2))
    bench.outputs.clear()
    bench.drain()
    assert bench.tokens("a") == expected_tokens(range(300, 310), 2)


def test_no_row_is_planned_for_one_that_is_sure_to_end() -> None:
    bench = ahead()
    bench.add(request("none", range(5), 0), request("one", range(10, 15), 1), request("two", range(20, 25), 2))
    bench.drain()
    assert [len(batch.rows) for batch in bench.batches] == [3, 1]
    assert bench.tokens("two") == expected_tokens(range(20, 25), 2) and bench.final("none").num_output_tokens == 0


def test_an_abort_while_a_row_is_under_way() -> None:
    bench = ahead(page_size=4)
    bench.add(request("a", range(8), 50))
    bench.step()
    bench.scheduler.abort("a")
    bench.step()
    final = bench.final("a")
    assert final.finish_reason is FinishReason.ABORT
    assert final.num_output_tokens == 1 and bench.tokens("a") == expected_tokens(range(8), 1)
    bench.drain()
    assert bench.cache.num_locked_pages == 0


def test_a_follower_comes_in_beside_the_answer_of_its_leaders_last_chunk() -> None:
    """What the step under way computes may be read by the next one: it is planned with the whole chunk cached."""
    bench = ahead(chunk=16, page_size=4)
    shared = list(range(12))
    bench.add(request("leader", [*shared, 500], 3), request("follower", [*shared, 600], 3))
    bench.drain()
    assert bench.final("follower").num_cached_tokens == 12
    assert bench.tokens("follower") == expected_tokens([*shared, 600], 3)
    slots = [[row.slot for row in batch.rows] for batch in bench.batches]
    assert len(slots[0]) == 1 and len(slots[1]) == 2, "the follower waits one step, as without planning ahead"


def test_two_that_computed_the_same_share_pages_only_after_the_step() -> None:
    """The tree's pages win: those that they replace are held until the step that writes to them is answered (checked by the bench)."""
    bench = ahead(page_size=4, chunk=8, rows=2)
    bench.add(request("a", range(40), 3))
    bench.step()
    bench.scheduler._waiting._in_flight.look(())
    bench.add(request("b", [*range(24), 900, 901], 3))
    bench.drain()
    assert bench.tokens("a") == expected_tokens(range(40), 3)
    assert bench.tokens("b") == expected_tokens([*range(24), 900, 901], 3)


def test_a_forced_retraction_waits_for_the_answer() -> None:
    bench = ahead(forced=1)
    bench.add(*(request(f"r{i}", range(10 * i, 10 * i + 5), 8) for i in range(3)))
    bench.drain()
    assert bench.num_planned_ahead == 0
    assert bench.scheduler.totals.retracted_total > 0
    for i in range(3):
        assert bench.tokens(f"r{i}") == expected_tokens(range(10 * i, 10 * i + 5), 8)
