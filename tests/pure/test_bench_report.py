"""The figures of bench/: percentiles, summaries, what /metrics says, the floor of time to first token."""

import json
from itertools import accumulate
from pathlib import Path

import pytest

from bench.metrics import growth, parse_metrics
from bench.records import Overhead, RequestRecord, RunResult, percentile
from bench.report import append_jsonl, describe, medians, spread, summarize
from bench.servers import Server, ServerStartError
from bench.ttft import ModelShape, TtftPair, read_model_shape

METRICS = """\
# TYPE radixserve_step_seconds_total counter
radixserve_step_seconds_total{part="tree"} 0.25
radixserve_step_seconds_total{part="schedule"} 0.75
radixserve_step_seconds_total{part="forward"} 99.0
# TYPE radixserve_prefill_step_seconds_total counter
radixserve_prefill_step_seconds_total 80.0
# TYPE something_else gauge
something_else 7
"""


def record(ttft: float, gaps: tuple[float, ...], cached: int | None, prompt: int | None = 100, error: str | None = None) -> RequestRecord:
    times = tuple(accumulate((1.0 + ttft, *gaps)))
    return RequestRecord("r", "g", 0.9, 1.0, times[0], times, times[-1], prompt, cached, len(times), error, "x", 100)


def result(wall_s: float, *records: RequestRecord, ideal: float = 0.5, after: dict[str, float] | None = None) -> RunResult:
    overhead = Overhead(0.001, 0.002, 0.003, 0.1, 0.05, 0.0004)
    return RunResult("A", "2 at a time", wall_s, ideal, records, {} if after else None, after, overhead)


def test_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert percentile(list(range(100)), 0.95) == 95


def test_summary_of_a_run() -> None:
    summary = summarize("x", 1, result(2.0, record(0.1, (0.2, 0.4), 0), record(0.3, (0.6, 0.8), 90), record(9.0, (9.0,), 50, error="no")))
    assert (summary.in_tok, summary.in_tok_s, summary.out_tok_s, summary.out_tok) == (200, 100.0, 3.0, 6)
    assert (summary.requests, summary.failed, summary.requests_s) == (2, 1, 1.0)
    assert (summary.ttft_p50, summary.itl_p50, summary.itl_max) == pytest.approx((0.3, 0.6, 0.8))
    assert summary.tpot_p50 == pytest.approx(0.5)
    assert (summary.cached_tok, summary.served_in_tok, summary.hit_rate, summary.cached_requests) == (90, 200, 0.45, 1)
    text = describe(summary, 1, 1.0)
    assert "requests, 1 FAILED" in text
    assert "sent late by p50/p99/max 1.0/2.0/3.0 ms; 0.40 ms CPU per request, 5.0% of a core" in text


def test_the_servers_counter_is_compared() -> None:
    one = record(0.1, (0.2,), 30)
    assert "counter" not in describe(summarize("x", 1, result(1.0, one, after={"sglang:cached_tokens_total": 30.0})), 1, 1.0)
    told = describe(summarize("x", 1, result(1.0, one, after={'vllm:prefix_cache_hits_total{engine="0"}': 45.0})), 1, 1.0)
    assert "30 of 100 (the server's counter says 45: is there other traffic?)" in told


def test_a_server_that_tells_nothing_of_re_use() -> None:
    summary = summarize("x", 1, result(2.0, record(0.1, (0.2,), None, None), ideal=0.824))
    assert (summary.cached_tok, summary.hit_rate, summary.served_in_tok, summary.counted_cached_tok) == (None, None, None, None)
    assert "the server does not tell; token hit rate n/a (ideal 82.4 %)" in describe(summary, 1, 1.0)


def test_medians_are_by_field_and_keep_the_unknown() -> None:
    runs = [summarize("x", seed, result(wall, record(0.1, (0.2,), None))) for seed, wall in ((1, 5.0), (2, 1.0), (3, 2.0))]
    merged = medians(runs)
    assert (merged.wall_s, merged.in_tok_s, merged.seed, merged.label, merged.cached_tok) == (2.0, 50.0, 1, "x", None)
    assert spread([run.wall_s for run in runs]) == 5.0


def test_jsonl_keeps_one_record_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    append_jsonl(path, summarize("x", 1, result(2.0, record(0.1, (0.2,), 50))))
    append_jsonl(path, {"label": "x", "error": "no"})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["hit_rate"] == 0.5
    assert records[1] == {"label": "x", "error": "no"}


def test_metrics_are_read_by_name_and_labels() -> None:
    text = METRICS + 'a_total{model_name="m",tier="x y}"} 3\na_total{model_name="n",tier="x y}"} 4 1700\nbroken\nb{le="+Inf"} 1\n'
    figures = parse_metrics(text)
    assert figures['a_total{tier="x y}"}'] == 7.0
    assert figures['radixserve_step_seconds_total{part="forward"}'] == 99.0
    assert (figures["something_else"], figures['b{le="+Inf"}'], "broken" in figures) == (7.0, 1.0, False)
    assert parse_metrics(text, ("something",)) == {"something_else": 7.0}
    assert growth({"a_total": 1.0}, figures, "no_such", "a_total") == 7.0
    assert growth({}, figures, "no_such") is growth(None, figures, "a_total") is None


def test_the_floor_of_time_to_first_token() -> None:
    """A model of 7 billion parameters, and the default model's size."""
    seven_billion = ModelShape(6_740_000_000, 32, 4096)
    assert seven_billion.floor(1024, 896) == pytest.approx(0.127, abs=0.001)
    assert seven_billion.floor(4096, 3968) == pytest.approx(0.034, abs=0.001)
    assert ModelShape(135_000_000, 30, 576).floor(10_000, 9_000) == pytest.approx(0.151, abs=0.001)
    assert TtftPair(1024, 896, 3, cold_s=2.0, hit_s=0.3, cached_tok=896, floor=0.12).over_floor == pytest.approx(1.25)


def test_the_model_shape_is_read_without_the_weights(tmp_path: Path) -> None:
    head = json.dumps({"__metadata__": {"format": "pt"}, "a": {"shape": [3, 4]}, "b": {"shape": [5]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 4}))
    assert read_model_shape(tmp_path) == ModelShape(17, 2, 4)


async def test_a_server_that_does_not_start_shows_its_log() -> None:
    server = Server("on", ["--no-such-flag"])
    with pytest.raises(ServerStartError, match="ended with"):
        await server.__aenter__()
