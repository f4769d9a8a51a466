"""Priorities, the length of the queue, and how long a request may wait or take."""

import dataclasses

import pytest

from radixserve.config import SchedulerConfig
from radixserve.core import FinishReason, Request
from radixserve.errors import QueueFullError
from radixserve.scheduler.ends import OutsideEnds
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request


def with_priority(one: Request, priority: int) -> Request:
    return dataclasses.replace(one, priority=priority)


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight", "cost"])
def test_higher_priority_runs_first(policy: str) -> None:
    bench = Bench(rows=1, policy=policy)
    bench.add(request("warm", range(2, 30), max_tokens=1))
    bench.drain()
    bench.add(with_priority(request("low", [*range(2, 30), 9], max_tokens=1), -1))
    bench.add(request("normal", range(300, 310), max_tokens=1))
    bench.add(with_priority(request("high", range(400, 410), max_tokens=1), 5))
    bench.drain()
    assert [output.request_id for output in bench.outputs if output.is_final] == ["warm", "high", "normal", "low"]


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    bench = Bench(rows=1, max_queued_requests=3)
    bench.add(request("runs", range(2, 10), max_tokens=5, ignore_eos=True))
    bench.step()
    for i in range(3):
        bench.add(request(f"waits{i}", range(10 * i + 50, 10 * i + 58), max_tokens=1))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        bench.add(request("refused", [5]))
    bench.drain()
    assert sum(output.is_final for output in bench.outputs) == 4
    bench.add(request("later", [5, 6], max_tokens=1))
    bench.drain()
    assert bench.tokens("later") == expected_tokens([5, 6], 1)


def test_waiting_too_long_ends_in_an_error() -> None:
    bench = Bench(rows=1, queue_timeout_s=5.0)
    bench.add(request("runs", range(2, 10), max_tokens=30, ignore_eos=True), request("waits", range(50, 60), max_tokens=1))
    bench.drain()
    final = bench.final("waits")
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is not None
    assert (final.error.http_status, final.error.code) == (503, "queue_timeout")
    assert "waited longer than the 5 s" in final.error.message
    assert bench.tokens("runs") == expected_tokens(range(2, 10), 30), "who runs is not timed out by the queue's limit"
    assert bench.scheduler.totals.timed_out_total == 1


def test_taking_too_long_ends_in_an_error_and_gives_the_pages_back() -> None:
    bench = Bench(rows=2, request_timeout_s=10.0)
    bench.add(request("slow", range(2, 10), max_tokens=100, ignore_eos=True), request("fast", range(50, 60), max_tokens=4, ignore_eos=True))
    bench.drain()
    final = bench.final("slow")
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is not None and final.error.code == "request_timeout"
    assert 5 < final.num_output_tokens < 15
    assert bench.tokens("fast") == expected_tokens(range(50, 60), 4)
    assert bench.cache.num_free_pages + bench.cache.num_evictable_pages == bench.cache.num_pages


def test_a_timed_out_head_does_not_hold_up_those_who_fit() -> None:
    """The head does not fit and times out while another request decodes; the one behind it fits, and must run at once."""
    bench = Bench(rows=4, num_pages=100, queue_timeout_s=5.0, policy="fcfs")
    bench.add(request("runs", range(2, 12), max_tokens=60, ignore_eos=True))
    bench.step()
    bench.add(request("big", range(100, 140), max_tokens=30, ignore_eos=True))
    for _ in range(3):
        bench.step()
    bench.add(request("small", range(300, 305), max_tokens=1))
    bench.drain()
    assert bench.final("big").finish_reason is FinishReason.ERROR
    assert bench.tokens("small") == expected_tokens(range(300, 305), 1)


def test_a_burst_that_finds_free_slots_is_not_refused() -> None:
    bench = Bench(rows=8, max_queued_requests=3)
    for i in range(11):
        bench.add(request(f"a{i}", [5 + i, 6], max_tokens=1))
    with pytest.raises(QueueFullError):
        bench.add(request("one too many", [5]))
    bench.drain()
    assert sum(output.is_final for output in bench.outputs) == 11


@pytest.mark.parametrize("mark", ["abort", "finish"])
def test_a_mark_does_not_hit_a_new_request_of_the_same_id(mark: str) -> None:
    """Marked between schedule and update, by which it ends; its id is free again."""
    bench = Bench()
    bench.add(request("a", range(2, 10), max_tokens=2, ignore_eos=True))
    bench.step()
    batch = bench.scheduler.schedule(2.0)
    assert batch is not None
    if mark == "abort":
        bench.scheduler.abort("a")
    else:
        bench.scheduler.finish("a", 1)
    (final,) = bench.scheduler.update(bench.runner.execute(batch), 2.0)
    assert final.is_final
    bench.add(request("a", range(50, 60), max_tokens=5, ignore_eos=True))
    bench.drain()
    assert bench.final("a").finish_reason is FinishReason.LENGTH
    assert bench.tokens("a")[1:] == expected_tokens(range(50, 60), 5)


def test_time_limits_cost_nothing_per_waiting_request() -> None:
    """With both limits on, a step looks at the first of 5,000 in time, and at no other."""

    class Counting(RequestState):
        num_looks = 0

        @property
        def arrival_s(self) -> float:
            Counting.num_looks += 1
            return 0.0

        @arrival_s.setter
        def arrival_s(self, value: float) -> None:
            pass

    config = SchedulerConfig(queue_timeout_s=100.0, request_timeout_s=100.0)
    cache = PrefixCache(100)
    waiting, running = WaitingQueue(config, cache), RunningRequests(cache, 1)
    ends = OutsideEnds(config, waiting, running)
    for i in range(5000):
        ends.added(Counting(request(str(i), [5, i], 1), 0.0, 2, i))
    assert list(ends.late(50.0)) == []
    assert Counting.num_looks <= 4
    late = []
    for end in ends.late(101.0):
        ends.ended(end.state)
        late.append(end.state.arrival)
    assert late == list(range(5000))
