"""The simulator: bounds against brute force, runs against bounds and against themselves, traces with their true token counts."""

import json
import random
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from bench.simulate import main
from bench.simulator.bounds import best_hits, one_after_the_other
from bench.simulator.cost import CostModel, StepShape, fit, modelled_h100_8b
from bench.simulator.fleet import FOREVER, Fleet, run_fleet
from bench.simulator.load import Load
from bench.simulator.replica import Replica, Settings
from bench.simulator.result import Result, result_of
from bench.simulator.router import ROUTERS, make_router
from bench.simulator.trace import MOONCAKE_BLOCK, Trace, TraceError, TraceRequest, load_trace
from radixserve.config import SchedulerConfig
from radixserve.core import IntArray
from radixserve.tree.eviction import EVICTION_POLICIES

COST = modelled_h100_8b()


class Paths:
    """Requests as paths of blocks, for bounds alone; `caps` leading blocks can be re-used."""

    def __init__(self, paths: Sequence[Sequence[int]], caps: Sequence[int]) -> None:
        self._paths = [array("i", path) for path in paths]
        self._caps = caps

    def whole_blocks(self, number: int) -> IntArray:
        return self._paths[number]

    def num_reusable(self, number: int) -> int:
        return self._caps[number]


def random_paths(rng: random.Random, num_requests: int) -> Paths:
    """Paths of a small trie: the id of a block says all that is before it."""
    ids: dict[tuple[int, ...], int] = {}
    paths, caps = [], []
    for _ in range(num_requests):
        words = tuple(rng.randrange(2) for _ in range(rng.randint(1, 3)))
        paths.append([ids.setdefault(words[: depth + 1], len(ids)) for depth in range(len(words))])
        caps.append(len(words) - (rng.random() < 0.3))
    return Paths(paths, caps)


def random_events(rng: random.Random, num_requests: int) -> list[int]:
    """Up to three requests at once, ending in any order."""
    events: list[int] = []
    running: list[int] = []
    for number in range(num_requests):
        while running and (len(running) == 3 or rng.random() < 0.6):
            events.append(-running.pop(rng.randrange(len(running))) - 1)
        running.append(number)
        events.append(number + 1)
    return events + [-number - 1 for number in running]


def brute_force(blocks: Paths, events: Sequence[int], capacity: int) -> int:
    """Try every choice of what to keep, at every end of a request."""

    @cache
    def best(place: int, kept: frozenset[int], in_use: tuple[int, ...]) -> int:
        if place == len(events):
            return 0
        number = abs(events[place]) - 1
        whole = list(blocks.whole_blocks(number))
        if events[place] > 0:
            hits = 0
            while hits < blocks.num_reusable(number) and (whole[hits] in kept or whole[hits] in in_use):
                hits += 1
            return hits + best(place + 1, kept - set(whole), tuple(sorted((*in_use, *whole))))
        left = list(in_use)
        for block in whole:
            left.remove(block)
        offered = sorted(kept | {block for block in whole if block not in left})
        choices = (choice for size in range(min(capacity, len(offered)) + 1) for choice in combinations(offered, size))
        return max(best(place + 1, frozenset(choice), tuple(left)) for choice in choices)

    return best(0, frozenset(), ())


@pytest.mark.parametrize("seed", range(120))
def test_the_bound_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_paths(rng, 7)
    events = one_after_the_other(7) if seed % 2 else random_events(rng, 7)
    for capacity in (1, 2, 4):
        assert best_hits(blocks, events, capacity) == brute_force(blocks, events, capacity)


def test_a_cache_without_end_hits_whatever_was_there_before() -> None:
    rng = random.Random(5)
    blocks = random_paths(rng, 200)
    seen: set[int] = set()
    hits = 0
    for number in range(200):
        whole = blocks.whole_blocks(number)
        hits += sum(block in seen for block in whole[: blocks.num_reusable(number)])
        seen |= set(whole)
    assert best_hits(blocks, one_after_the_other(200), None) == hits > 0


# ---- runs


def conversations(num_requests: int, seed: int, mean_blocks: int = 6) -> Trace:
    """Mooncake-like: one common block, conversations that grow by turns, one-off prompts between them."""
    rng = random.Random(seed)
    histories: list[list[int]] = []
    requests, next_id, now = [], 1, 0.0
    for _ in range(num_requests):
        if not histories or rng.random() < 0.4:
            histories.append([0])
        history = histories[rng.randrange(max(0, len(histories) - 12), len(histories))]
        grown = rng.randint(1, mean_blocks)
        history.extend(range(next_id, next_id + grown))
        next_id += grown
        prompt_len = len(history) * MOONCAKE_BLOCK - rng.choice((0, 1, 100, 511))
        requests.append(TraceRequest(now, prompt_len, rng.randint(1, 300), array("i", history)))
        if prompt_len % MOONCAKE_BLOCK:
            history.pop()  # the partial block is another one in the next turn
        now += rng.expovariate(4.0)
    return Trace("test", MOONCAKE_BLOCK, tuple(requests))


def settings(pool_blocks: int = 400, order: str = "lpm", eviction: str = "lru", rows: int = 16, **more: bool) -> Settings:
    scheduler = SchedulerConfig(schedule_policy=order, chunked_prefill_size=2048, max_running_requests=rows)
    return Settings(scheduler, pool_blocks * MOONCAKE_BLOCK, eviction, **more)


def run_alone(load: Load, one: Settings) -> Replica:
    replica = Replica(load, one, COST)
    for number in range(load.num_requests):
        replica.submit(number)
    replica.run_until(FOREVER)
    replica.scheduler.check_account()
    return replica


@pytest.mark.parametrize("eviction", list(EVICTION_POLICIES))
@pytest.mark.parametrize(("order", "rows"), [("lpm", 16), ("fcfs", 1), ("fcfs", 16)])
def test_no_policy_beats_the_bound_and_the_bound_not_the_ceiling(eviction: str, order: str, rows: int) -> None:
    load = Load(conversations(300, seed=3))
    hits = []
    for pool_blocks in (70, 120, 1600):
        replica = run_alone(load, settings(pool_blocks, order, eviction, rows))
        counts = result_of(replica, load, with_bounds=True).counts
        assert counts.requests + counts.refused == 300
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


# ---- traces


def write_mooncake(path: Path, trace: Trace) -> None:
    lines = [
        {
            "timestamp": round(request.arrival_s * 1000),
            "input_length": request.prompt_len,
            "output_length": request.output_len,
            "hash_ids": list(request.block_ids),
        }
        for request in trace.requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_hash_ids_stand_for_tokens_exactly(tmp_path: Path) -> None:
    """The same trace as hash ids and written out as token ids: same lengths, same hits, same times."""
    write_mooncake(tmp_path / "hashes.jsonl", conversations(60, seed=12, mean_blocks=3))
    hashes = load_trace(tmp_path / "hashes.jsonl")
    lines = [
        {"timestamp": round(one.arrival_s * 1000), "token_ids": list(hashes.prompt(index)), "output_length": one.output_len}
        for index, one in enumerate(hashes.requests)
    ]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = load_trace(tmp_path / "tokens.jsonl", page_size=MOONCAKE_BLOCK)
    of_hashes, of_tokens = (result_of(run_alone(load, settings(120)), load, with_bounds=True) for load in (Load(hashes), Load(tokens)))
    assert of_hashes == of_tokens
    assert of_hashes.counts.prompt_tokens == sum(one.prompt_len for one in hashes.requests)
    assert of_hashes.counts.hit_tokens > 0


def test_the_next_turn_reuses_a_known_answer(tmp_path: Path) -> None:
    first, answer = list(range(10, 40)), [7, 8, 9, 6]
    lines = [
        {"timestamp": 0, "token_ids": first, "output_ids": answer},
        {"timestamp": 60_000, "token_ids": [*first, *answer, 50, 51], "output_length": 2},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = Load(load_trace(tmp_path / "chat.jsonl"))
    counts = result_of(run_alone(load, settings(pool_blocks=1)), load, with_bounds=True).counts
    assert counts.hit_tokens == counts.bound_tokens == 33, "all but the last token of the answer"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: expected a JSON object"),
        ('{"timestamp": 0}', "hash_ids or token_ids"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "one hash id per 512 tokens of 600, got 1"),
        (
            '{"timestamp": 0, "input_length": 6, "output_length": 0, "hash_ids": [1]}',
            "output_length: expected an integer of at least 1, got 0",
        ),
        ('{"timestamp": 0, "output_length": 1, "token_ids": [1, -1]}', "token_ids: expected a list of integers"),
        ("", "at least one request"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match=message):
        load_trace(path)


# ---- cost and command


def test_the_fit_finds_the_coefficients_of_exact_times() -> None:
    rng = random.Random(13)
    shapes = [StepShape(rng.randrange(512), rng.randrange(10**6), rng.randrange(32), rng.randrange(10**5)) for _ in range(60)]
    times = [COST.seconds(shape) for shape in shapes]
    model = fit("again", "test", shapes, times)
    for name in ("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s"):
        assert getattr(model, name) == pytest.approx(getattr(COST, name), rel=1e-6)
    without_rows = [shape._replace(decode_rows=0, decode_context=0) for shape in shapes]
    assert fit("again", "test", without_rows, [time_s * 1.5 for time_s in times]).decode_row_s == 0


def test_a_cost_model_survives_its_file(tmp_path: Path) -> None:
    COST.save(tmp_path / "one.json")
    assert CostModel.load(str(tmp_path / "one.json")) == COST
    with pytest.raises(ValueError, match=r"cost: expected a file or one of .*h100-8b, got 'abacus'"):
        CostModel.load("abacus")


def test_the_command_prints_a_row_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mooncake(tmp_path / "small.jsonl", conversations(80, seed=14))
    assert main([str(tmp_path / "small.jsonl"), "--orders", "lpm,fcfs", "--evictions", "lru,none", "--pool-tokens", "204800"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [(row[1].strip(), row[2].strip().split()[0]) for row in rows[1:]] == [
        ("lpm", "lru"),
        ("lpm", "none"),
        ("fcfs", "lru"),
        ("fcfs", "none"),
    ]
    assert float(rows[1][4]) > float(rows[2][4]) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--orders", "shortest"], "expected one of"),
        (["--evictions", "belady"], "eviction: expected"),
        (["--routers", "nearest", "--replicas", "2"], "router: expected"),
        (["--cost", "abacus"], "cost: expected"),
        (["--pool-tokens", "100"], "pool: expected at least one page of 512"),
        (["--page-size", "16"], "blocks of this trace are 512"),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    write_mooncake(tmp_path / "small.jsonl", conversations(20, seed=15))
    assert main([str(tmp_path / "small.jsonl"), *arguments]) == 2
    assert message in capsys.readouterr().err
