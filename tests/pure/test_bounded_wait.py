"""Nobody waits for ever: adversarial streams and bursts against the two bounds, with a cache that is as warm as the adversary likes."""

import dataclasses
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import random_order
from radixserve.config import SchedulerConfig
from radixserve.core import Request
from radixserve.scheduler.order.ranking import Rules
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, ints, request
from tests.support.examples import examples

WARM_LEN = 100
WARM = [7] * WARM_LEN


def warm_cache() -> PrefixCache:
    cache = PrefixCache(2000)
    path = cache.lock(cache.match(request("w", WARM).namespace, ints(WARM), 0), 0.0)
    cache.reserve(path, WARM_LEN, 0.0)
    cache.release(path, ints(WARM), WARM_LEN, 0.0)
    return cache


class Door:
    """The queue with an admission of its own: nothing runs, every admitted request is gone at once."""

    def __init__(self, cache: PageCache, rules: Rules | None = None, **config: object) -> None:
        self.queue = WaitingQueue(SchedulerConfig(**config), cache, rules)  # type: ignore[arg-type]
        self.num_added = 0
        self.admitted: list[RequestState] = []

    def add(self, tokens: list[int], priority: int = 0) -> RequestState:
        self.num_added += 1
        one = dataclasses.replace(request(str(self.num_added), tokens), priority=priority)
        state = RequestState(one, 0.0, len(tokens), self.num_added)
        self.queue.add(state)
        return state

    def admit(self, count: int) -> list[RequestState]:
        """One pass."""
        self.queue.start_pass(())
        got: list[RequestState] = []
        while len(got) < count and (head := self.queue.head()) is not None:
            self.queue.admitted(head)
            self.queue._in_flight.look(())  # it leads nobody
            got.append(head)
        self.admitted += got
        return got


@settings(max_examples=examples(40), deadline=None)
@given(
    credit=st.sampled_from([1, 7, 10, 33, 100, 1000]),
    per_pass=st.integers(1, 3),
    arrivals=st.lists(st.lists(st.integers(0, WARM_LEN), max_size=6), min_size=30, max_size=120),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight", "cost"]),
    limit=st.sampled_from([1, 5, 64, 10**6]),
)
def test_both_bounds_hold_whatever_comes(credit: int, per_pass: int, arrivals: list[list[int]], policy: str, limit: int) -> None:
    """arrivals: for each pass, how much of the warm prefix each new prompt has."""
    door = Door(warm_cache(), schedule_policy=policy, lpm_age_credit=credit, lpm_max_overtaken=limit)
    for lengths in arrivals:
        for length in lengths:
            door.add([*WARM[:length], 9, door.num_added + 1000])
        door.admit(per_pass)
    while door.admit(per_pass):
        pass
    assert len(door.admitted) == door.num_added
    place = {state.arrival: index for index, state in enumerate(door.admitted)}
    for state in door.admitted:
        overtaking = [other for other in door.admitted[: place[state.arrival]] if other.arrival > state.arrival]
        assert len(overtaking) <= limit
        if policy == "lpm":
            assert all(other.arrival_pass - state.arrival_pass <= ceil(WARM_LEN / credit) for other in overtaking)
        if policy == "fcfs":
            assert not overtaking


@settings(max_examples=examples(40), deadline=None)
@given(
    aging=st.sampled_from([1, 3, 8, 256]),
    arrivals=st.lists(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, WARM_LEN)), max_size=5), min_size=20, max_size=80),
    policy=st.sampled_from(["lpm", "dfs-weight", "cost"]),
    limit=st.sampled_from([1, 5, 20]),
)
def test_with_classes_each_overtaking_counts_and_nothing_else(
    aging: int, arrivals: list[list[tuple[int, int]]], policy: str, limit: int
) -> None:
    """Nobody is overtaken more than `limit` times since it began to wait, and while nobody was so often, the policy alone decides."""
    limits = {"schedule_policy": policy, "lpm_age_credit": 2, "priority_aging_passes": aging}
    door = Door(warm_cache(), lpm_max_overtaken=limit, **limits)

    def arrived(state: RequestState) -> tuple[int, int]:
        return state.arrival_pass - aging * state.request.priority, state.arrival

    count: dict[int, int] = {}
    for step in range(10_000):
        for priority, length in arrivals[step] if step < len(arrivals) else ():
            count[door.add([*WARM[:length], 9, door.num_added + 1000], priority).arrival] = 0
        door.queue.start_pass(())
        head, by_policy = door.queue.head(), door.queue._kept[-1].first()
        if head is None and step >= len(arrivals):
            break
        if head is None:
            continue
        if all(count[state.arrival] < limit for state in door.queue):
            assert head is by_policy
        for state in door.queue:
            count[state.arrival] += arrived(head) > arrived(state)
        assert all(count[state.arrival] <= limit for state in door.queue)
        door.queue.admitted(head)
        door.queue._in_flight.look(())
    assert len(door.queue) == 0


def test_an_urgent_class_is_not_overdue_at_birth() -> None:
    door = Door(warm_cache(), schedule_policy="lpm")
    for i in range(100):
        door.add([500 + i, 1])
    door.admit(100)
    door.add([700, 1], priority=1)
    hit = door.add([*WARM, 9], priority=1)
    assert door.admit(1) == [hit]


def test_who_comes_back_is_not_overdue_for_what_was_admitted_while_it_ran() -> None:
    door = Door(warm_cache(), schedule_policy="lpm", lpm_max_overtaken=3, lpm_age_credit=1)
    long = door.add([500, 1])
    door.admit(1)
    for i in range(5):
        door.add([600 + i, 1])
    door.admit(5)
    door.queue.add(long)
    hit = door.add([*WARM, 9])
    assert door.admit(1) == [hit]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "cost"])
def test_an_endless_warm_stream_passes_a_cold_request_64_times_and_no_more(policy: str) -> None:
    door = Door(warm_cache(), schedule_policy=policy, lpm_age_credit=1)
    for i in range(3):
        door.add([*WARM, 900 + i])
    cold = door.add(list(range(500, 600)))
    for i in range(300):
        door.add([*WARM, 1000 + i])
        if cold in door.admit(1):
            break
    overtaking = [state for state in door.admitted if state.arrival > cold.arrival]
    assert cold in door.admitted
    assert len(overtaking) <= 64
    if policy == "dfs-weight":
        assert len(overtaking) == 64, "nothing else ends it"


@pytest.mark.parametrize(("rows", "num_tokens", "page_size"), [(1, 200, 1), (3, 200, 1), (4, 100, 4)])
@pytest.mark.parametrize("limit", [1, 64])
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "cost", "fcfs"])
def test_seen_from_outside_the_bound_is_exact(policy: str, limit: int, rows: int, num_tokens: int, page_size: int) -> None:
    """By the batches of a whole scheduler: in each step come as many warm prompts as there are slots, and a cold one that needs half the
    pool, of which the warm ones hold the rest."""
    bench = Bench(num_tokens // page_size, page_size, 64, rows, policy, lpm_max_overtaken=limit, lpm_age_credit=1)
    warm, num_sent = [7] * 40, 0
    bench.add(request("first", warm, max_tokens=1))
    bench.drain()

    def send(count: int) -> None:
        nonlocal num_sent
        for _ in range(count):
            num_sent += 1
            lengths = {"max_tokens": 1 + num_sent % 3, "ignore_eos": True}
            bench.add(request(f"warm {num_sent}", [*warm[: 40 - 20 * (num_sent % 4 == 0)], 100 + num_sent, 5], **lengths))  # type: ignore[arg-type]

    send(3)
    bench.step()
    num_before = num_sent
    bench.add(request("cold", range(5000, 5000 + num_tokens // 2), max_tokens=3, ignore_eos=True))
    for _ in range(200):
        send(rows)
        bench.step()
        if bench.final_or_none("cold") is not None:
            break
    assert bench.tokens("cold") == expected_tokens(range(5000, 5000 + num_tokens // 2), 3)
    admitted = [row.request.request_id for batch in bench.batches for row in batch.rows if row.request is not None]
    passed_by = [name for name in admitted[1 : admitted.index("cold")] if int(name.split()[1]) > num_before]
    assert len(passed_by) == (0 if policy == "fcfs" else limit)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "cost"])
def test_a_burst_of_5000_in_one_pass_counts_like_any_other(policy: str) -> None:
    """All have the same pass, so no credit ever tells them apart."""
    door = Door(warm_cache(), schedule_policy=policy, lpm_age_credit=10**6)
    cold = [door.add([500 + i, 1, 2, 3]) for i in range(3)]
    for i in range(5000):
        door.add([*WARM, 1000 + i])
    got = door.admit(500)
    assert [got.index(state) for state in cold] == [64, 65, 66]
    # each of the burst is passed by nobody: they are alike, and go as they came
    later = [state.arrival for state in got if state not in cold]
    assert later == sorted(later)


def test_the_overdue_blocks_until_it_fits() -> None:
    bench = Bench(num_pages=60, rows=4, chunk=64, lpm_max_overtaken=3)
    bench.add(request("warm", range(2, 12), max_tokens=1))
    bench.drain()
    bench.add(request("holder", range(700, 720), max_tokens=25, ignore_eos=True))
    bench.step()
    bench.add(request("big", range(400, 450), max_tokens=1))
    for i in range(10):
        bench.add(request(f"small{i}", [*range(2, 10), 300 + i], max_tokens=1))
    bench.drain()
    order = [output.request_id for output in bench.outputs if output.is_final]
    assert order.index("big") == order.index("holder") + 1
    assert [name for name in order[: order.index("holder")] if name.startswith("small")] == ["small0", "small1", "small2"]


def test_equal_score_goes_by_arrival_and_score_ages_by_passes() -> None:
    door = Door(warm_cache(), schedule_policy="lpm", lpm_age_credit=10)
    cold = door.add([500, 1])
    for i in range(20):
        door.add([*WARM[:45], 1000 + i])
        got = door.admit(1)
        if cold in got:
            # the one of pass p has 45 - 10 p: that of pass 4 is the last to be ahead of a cold one of pass 0
            assert i == 5
            return
    raise AssertionError("the cold request never came")


def test_priority_goes_first_for_so_many_passes_and_not_for_ever() -> None:
    door = Door(DisabledCache(100), schedule_policy="fcfs", priority_aging_passes=8)
    low = door.add([5, 6], priority=-2)
    for i in range(40):
        door.add([7, 8], priority=0)
        if low in door.admit(1):
            # what came 16 passes later is as urgent by now, and goes after it
            assert i == 16
            return
    raise AssertionError("the low one never came")


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight", "cost"])
def test_priority_comes_before_any_match(policy: str) -> None:
    door = Door(warm_cache(), schedule_policy=policy)
    door.add([*WARM, 9])
    urgent = door.add([500, 1], priority=1)
    assert door.admit(1) == [urgent]


def test_dfs_weight_goes_down_the_heaviest_cached_branch() -> None:
    """As SGLang's: a branch that is cached, heaviest first; what has no cached branch comes last, as it arrived."""
    door = Door(warm_cache(), schedule_policy="dfs-weight")
    names: dict[int, str] = {}
    prompts = {"cold": [500, 1], "light": [*WARM[:10], 3, 4], "heavy1": [*WARM[:50], 5, 1], "other": [600, 1], "heavy2": [*WARM[:50], 6, 1]}
    for name, tokens in prompts.items():
        names[door.add(tokens).arrival] = name
    assert [names[state.arrival] for state in door.admit(5)] == ["heavy1", "heavy2", "light", "cold", "other"]


def test_dfs_weight_ends_a_branch_before_it_begins_another() -> None:
    """Equal weights: each admission makes the branch it was taken from the lighter one."""
    door = Door(warm_cache(), schedule_policy="dfs-weight")
    names: dict[int, str] = {}
    for i in range(4):
        for name, length in (("A", 50), ("B", 80)):
            names[door.add([*WARM[:length], *WARM[: 1 if name == "B" else 0], 300 if name == "A" else 400, 900 + i]).arrival] = f"{name}{i}"
    got = [names[door.admit(1)[0].arrival] for _ in range(8)]
    assert got in (["A0", "A1", "A2", "A3", "B0", "B1", "B2", "B3"], ["B0", "B1", "B2", "B3", "A0", "A1", "A2", "A3"])


def test_cost_does_not_charge_a_hit_for_the_pages_that_it_finds() -> None:
    cache = warm_cache()
    door = Door(cache, schedule_policy="cost")
    for i in range(5):
        door.add([*WARM, 900 + i])
    for state in list(door.queue):
        state.num_computed = WARM_LEN
    door.admit(5)
    long = list(range(1000, 2500))
    path = cache.lock(cache.match(request("l", long).namespace, ints(long), 0), 0.0)
    cache.reserve(path, len(long), 0.0)
    cache.release(path, ints(long), len(long), 0.0)
    assert cache.num_free_pages == 400
    cold = door.add(list(range(3000, 3500)))
    hit = door.add([*long, *range(10)])
    assert door.queue._num_short_tokens(hit) == 0 < door.queue._num_short_tokens(cold)
    assert door.admit(2) == [hit, cold]


def test_cost_takes_the_least_work_that_is_left() -> None:
    door = Door(warm_cache(), schedule_policy="cost")
    names: dict[int, str] = {}
    prompts = {"long": list(range(500, 560)), "short": [600, *range(40)], "cached": [*WARM, *range(20)]}
    for name, tokens in prompts.items():
        names[door.add(tokens).arrival] = name
    assert [names[state.arrival] for state in door.admit(3)] == ["cached", "short", "long"]


def test_cost_counts_decode_and_what_must_be_evicted() -> None:
    cache = warm_cache()
    door = Door(cache, schedule_policy="cost")
    for i in range(5):
        door.add([*WARM, 900 + i])
    for state in list(door.queue):
        state.num_computed = WARM_LEN  # found again, as the scheduler would say it
    door.admit(5)
    wordy = RequestState(request("wordy", [500, 1], max_tokens=500), 0.0, 501, 100)
    terse = RequestState(request("terse", [600, 1], max_tokens=2), 0.0, 3, 101)
    # it would need 2,500 pages, of which 1,900 are free; about 96 % of tokens were found again
    huge = RequestState(request("huge", [700, 1], max_tokens=2), 0.0, 2500, 102)
    for state in (wordy, huge, terse):
        door.queue.add(state)
    assert door.queue._num_short_tokens(terse) == 0
    assert 500 < door.queue._num_short_tokens(huge) < 600
    assert door.admit(3) == [terse, huge, wordy]


def with_priority(one: Request, priority: int) -> Request:
    return dataclasses.replace(one, priority=priority)


def preempted(threshold: int = 10, gap: int = 11, **limits: object) -> Bench:
    bench = Bench(rows=2, chunk=64, num_pages=400, priority_scheduling_preemption_threshold=threshold, **limits)
    for i in range(2):
        bench.add(with_priority(request(f"low{i}", range(100 * i + 2, 100 * i + 12), max_tokens=40, ignore_eos=True), -gap))
    for _ in range(5):
        bench.step()
    bench.add(request("urgent", range(500, 510), max_tokens=3, ignore_eos=True))
    bench.drain()
    assert bench.tokens("urgent") == expected_tokens(range(500, 510), 3)
    for i in range(2):
        assert bench.tokens(f"low{i}") == expected_tokens(range(100 * i + 2, 100 * i + 12), 40)
    return bench


def test_an_urgent_request_takes_a_slot_from_one_far_below() -> None:
    """SCHED-21, SCHED-23, SCHED-25: it runs at once, the victim resumes, and every answer is right."""
    bench = preempted()
    order = [output.request_id for output in bench.outputs if output.is_final]
    assert order == ["urgent", "low0", "low1"], "the later arrival of two equal ones gives way"
    assert bench.scheduler.totals.retracted_total == 1
    assert bench.final("urgent").queue_time_s <= 1.0


@pytest.mark.parametrize("limits", [{"gap": 10}, {"threshold": 20}, {"disable_priority_preemption": True}])
def test_no_preemption_within_the_threshold_or_when_it_is_off(limits: dict[str, object]) -> None:
    bench = preempted(**limits)  # type: ignore[arg-type]
    assert bench.scheduler.totals.retracted_total == 0
    assert [output.request_id for output in bench.outputs if output.is_final][-1] == "urgent"


def test_an_urgent_request_takes_pages_from_those_far_below_and_only_if_they_suffice() -> None:
    bench = Bench(rows=8, chunk=128, num_pages=100)
    for i in range(3):
        bench.add(with_priority(request(f"low{i}", range(100 * i + 2, 100 * i + 22), max_tokens=10, ignore_eos=True), -20))
    bench.step()
    bench.add(request("urgent", range(500, 540), max_tokens=20, ignore_eos=True))
    bench.step()
    assert bench.scheduler.totals.retracted_total == 2, "two of three are enough"
    assert bench.batches[-1].rows[-1].count == 40
    bench.drain()
    for i in range(3):
        assert bench.tokens(f"low{i}") == expected_tokens(range(100 * i + 2, 100 * i + 22), 10)

    bench = Bench(rows=8, chunk=128, num_pages=100)
    bench.add(with_priority(request("low", range(2, 12), max_tokens=10, ignore_eos=True), -20))
    bench.add(request("equal", range(300, 360), max_tokens=20, ignore_eos=True))
    bench.step()
    bench.add(request("urgent", range(500, 540), max_tokens=20, ignore_eos=True))
    bench.step()
    assert bench.scheduler.totals.retracted_total == 0, "what the low one holds would not be enough"
    bench.drain()


def test_the_preempted_comes_back_before_newcomers_of_its_class_and_is_not_preempted_for_ever() -> None:
    """SCHED-24. An endless urgent stream, two slots: the low one ages past it and ends."""
    bench = Bench(rows=1, chunk=64, num_pages=400, priority_aging_passes=1)
    bench.add(with_priority(request("low", range(2, 12), max_tokens=60, ignore_eos=True), -11))
    bench.step()
    for i in range(200):
        bench.add(request(f"urgent{i}", [500 + i, 6], max_tokens=2, ignore_eos=True))
        bench.add(with_priority(request(f"low{i}", [800 + i, 7], max_tokens=1, ignore_eos=True), -11))
        bench.step()
        bench.step()
        if bench.final_or_none("low"):
            break
    assert bench.final_or_none("low")
    ended = [output.request_id for output in bench.outputs if output.is_final]
    assert bench.scheduler.totals.retracted_total >= 1
    assert not any(name.startswith("low") for name in ended[: ended.index("low")])
    assert bench.tokens("low") == expected_tokens(range(2, 12), 60)


def test_an_overdue_follower_waits_for_one_leader_and_no_other() -> None:
    """A stream of leaders that get nowhere cannot hold it for ever."""
    door = Door(PrefixCache(1000), lpm_max_overtaken=1)
    leaders = [RequestState(request(f"leader{i}", WARM), 0.0, WARM_LEN, 1000 + i) for i in range(3)]
    follower = door.add(WARM)
    stranger = door.add([500, 1])
    for leader in leaders:
        door.queue.start_pass([leader])
        assert door.queue.head() is stranger, "it is not overdue, and may wait for one after the other"
    door.queue.admitted(stranger)
    door.queue.start_pass([leaders[0]])
    assert door.queue.head() is None
    later = door.add([600, 1])
    door.queue.start_pass([leaders[0]])
    assert door.queue.head() is later, "who is overdue and waits for a leader does not block others"
    door.queue.start_pass([leaders[1]])
    assert door.queue.head() is follower


def test_who_comes_back_does_not_hide_an_overdue_follower() -> None:
    """It is older and begins to wait anew, so it is not overdue; the follower beside it waits for one leader still, and no other."""
    door = Door(PrefixCache(1000), lpm_max_overtaken=2)
    elder = door.add(WARM)
    follower = door.add(WARM)
    leaders = [RequestState(request(f"leader{i}", WARM), 0.0, WARM_LEN, 1000 + i) for i in range(2)]
    door.queue.remove(elder.request.request_id)  # it runs
    strangers = [door.add([500 + i, 1]) for i in range(2)]
    for stranger in strangers:
        door.queue.start_pass(leaders[:1])
        assert door.queue.head() is stranger
        door.queue.admitted(stranger)
    door.queue.add(elder)
    door.queue.start_pass(leaders[:1])
    assert door.queue.head() is None and follower.leader == leaders[0].arrival and elder.leader is None
    door.queue.start_pass(leaders[1:])
    assert door.queue.head() is elder, "the two go on alike, and it is the older one"


def test_another_order_can_be_tried() -> None:
    door = Door(warm_cache(), random_order(1), lpm_max_overtaken=10**6)
    for i in range(50):
        door.add([5, i])
    got = [state.arrival for state in door.admit(50)]
    assert sorted(got) == list(range(1, 51)) != got
