"""What goes into the simulator and comes out: traces with their true token counts, cost models, the command."""

import json
import random
from pathlib import Path

import pytest

from bench.simulate import main
from bench.simulator.cost import CostModel, StepShape, fit
from bench.simulator.load import Load
from bench.simulator.result import result_of
from bench.simulator.trace import MOONCAKE_BLOCK, Trace, TraceError, load_trace
from bench.simulator.tracelab import TraceLabError
from tests.pure.simulated import COST, conversations, run_alone, settings


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
        ('{"timestamp": 0}', "hash_ids, token_ids or prefix_tokens"),
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


def test_sessions_of_tracelab_repeat_what_came_before(tmp_path: Path) -> None:
    head = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    path = tmp_path / "sessions.csv"
    path.write_text(head + "0,100,0,0,6,2,300\n1,200,0,3,4,1,50\n0,100,1,8,4,2,0\n0,100,2,5,1,1,0\n")
    trace = load_trace(path, page_size=2)
    first, other, second, third = trace.requests
    assert [request.arrival_s for request in trace.requests] == [0.1, 0.2, 0.4, 0.4]
    assert [request.prompt_len for request in trace.requests] == [6, 7, 12, 6]
    assert second.prompt_ids is not None and first.prompt_ids is not None and first.output_ids is not None and third.prompt_ids is not None
    assert second.prompt_ids[:8] == first.prompt_ids + first.output_ids
    assert third.prompt_ids[:5] == first.prompt_ids[:5]
    assert not set(other.prompt_ids or ()) & {*first.prompt_ids, *second.prompt_ids, *third.prompt_ids}
    assert second.block_ids[:3] == first.block_ids[:3]


@pytest.mark.parametrize("row", ["0,0,0,x,1,1,1", "0,0,0,1,-1,1,1", "0,0,0"])
def test_a_bad_round_is_told_by_file_and_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "sessions.csv"
    path.write_text("session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n" + row + "\n")
    with pytest.raises(TraceLabError, match=r"sessions.csv, line 2: .*: expected an integer of at least 0"):
        load_trace(path)


def recorded_round(session: str, inputs_at: list[str], prefix: int, new: int, output: int) -> dict[str, object]:
    events = [{"event_type": "tool_result", "timestamp": f"2026-06-01T05:40:{at}Z"} for at in inputs_at]
    events.append({"event_type": "text", "timestamp": "2026-06-01T05:59:59.000Z"})
    lens = {"prefix_tokens": prefix, "newly_append_tokens": new, "output_tokens": output}
    return {"session_id": session, "current_input_event_count": len(inputs_at), "timing_events": events} | lens


def test_recorded_rounds_of_tracelab_come_when_their_last_input_did(tmp_path: Path) -> None:
    rounds = [
        recorded_round("a", ["20.000"], 3, 5, 2),
        recorded_round("b", ["21.000"], 0, 4, 1),
        recorded_round("a", ["22.500", "20.500"], 10, 2, 4),
    ]
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rounds))
    first, other, second = load_trace(path, page_size=2).requests
    assert [one.arrival_s for one in (first, other, second)] == [0.0, 1.0, 2.5]
    assert [one.prompt_len for one in (first, other, second)] == [8, 4, 12]
    assert first.prompt_ids is not None and first.output_ids is not None and second.prompt_ids is not None and other.prompt_ids is not None
    assert second.prompt_ids[:10] == first.prompt_ids + first.output_ids
    assert not set(other.prompt_ids) & {*first.prompt_ids, *second.prompt_ids}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": "9"}, "output_tokens: expected an integer of at least 0, got '9'"),
        ({"timing_events": [{"timestamp": "noon"}]}, "expected session_id and timed timing_events"),
        ({"timing_events": []}, "expected session_id and timed timing_events"),
    ],
)
def test_a_bad_recorded_round_is_told_by_file_and_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "rounds.jsonl"
    good = recorded_round("a", ["20.000"], 3, 5, 2)
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(TraceLabError, match=f"rounds.jsonl, line 2: {message}"):
        load_trace(path)
