"""The figures of bench/: percentiles, summaries, what /metrics says, the floor of time to first token."""

import dataclasses
import json
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from bench.metrics import growth, parse_metrics
from bench.records import Overhead, RequestRecord, RunResult, overhead_of, percentile, with_zeros
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
    for values in ([4.0, 1.0, 3.0, 2.0], [float(value * value) for value in range(100)]):
        for share in (0.0, 0.5, 0.95, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(float(np.percentile(values, share * 100)))


def test_summary_of_a_run() -> None:
    summary = summarize("x", 1, result(2.0, record(0.1, (0.2, 0.4), 0), record(0.3, (0.6, 0.8), 90), record(9.0, (9.0,), 50, error="no")))
    assert (summary.in_tok, summary.in_tok_s, summary.out_tok_s, summary.out_tok) == (200, 100.0, 3.0, 6)
    assert (summary.requests, summary.failed, summary.requests_s) == (2, 1, 1.0)
    assert (summary.ttft_p50, summary.itl_p50, summary.itl_max) == pytest.approx((0.2, 0.5, 0.8))
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


def test_an_answer_that_says_nothing_of_re_use_had_none_where_others_say_it() -> None:
    """vLLM and SGLang leave prompt_tokens_details out of an answer that re-used nothing."""
    silent, told, lost = record(0.1, (), None), record(0.1, (), 7), record(0.1, (), None, None)
    assert [one.cached_tokens for one in with_zeros([silent, told, lost], None, None)] == [0, 7, None]
    assert [one.cached_tokens for one in with_zeros([silent, lost], None, None)] == [None, None]
    counter = "vllm:prefix_cache_hits_total"
    assert [one.cached_tokens for one in with_zeros([silent, lost], {counter: 5.0}, {counter: 5.0})] == [0, None]
    assert [one.cached_tokens for one in with_zeros([silent], {counter: 5.0}, {counter: 9.0})] == [None]


def test_a_hit_rate_above_the_ideal_is_told() -> None:
    assert "ABOVE IT" not in describe(summarize("x", 1, result(1.0, record(0.1, (0.2,), 50), ideal=0.5)), 1, 1.0)
    told = describe(summarize("x", 1, result(1.0, record(0.1, (0.2,), 99), ideal=0.0)), 1, 1.0)
    assert "(ideal 0.0 %: ABOVE IT, so the server knew these prompts from before; use --flush, or another --seed)" in told


def test_lateness_is_of_requests_that_were_sent() -> None:
    never = dataclasses.replace(record(0.1, (), 0), error="not sent, since a failed: no", sent_s=5.0, scheduled_s=5.0)
    assert overhead_of([record(0.1, (), 0), never], cpu_s=0.2, wall_s=2.0) == Overhead(*[pytest.approx(0.1)] * 3, 0.2, 0.1, 0.2)


@pytest.mark.parametrize(
    ("late_s", "cpu_share", "gc_max_s", "told"),
    [
        (0.015, 0.9, 0.015, ""),
        (0.3, 0.3, 0.28, "SENT LATE: .*; its garbage collector held it for 280.0 ms"),
        (0.3, 0.95, 0.01, "SENT LATE: .*; it needs more than the core that it has: lower the rate"),
        (0.3, 0.3, 0.01, "SENT LATE: .*; other work held its core, or the machine stood still"),
    ],
)
def test_a_generator_that_was_the_bottleneck_is_told(late_s: float, cpu_share: float, gc_max_s: float, told: str) -> None:
    overhead = Overhead(0.001, late_s, late_s, 1.0, cpu_share, 0.001, gc_max_s, core_wait_s=0.5)
    done = dataclasses.replace(result(2.0, record(0.1, (0.2,), 50)), overhead=overhead)
    quick = result(2.0, record(0.1, (0.2,), 50))
    # one run of three is enough
    text = describe(medians([summarize("x", 1, quick), summarize("x", 2, done), summarize("x", 3, quick)]), 3, 1.0)
    assert re.search(told, text) if told else "SENT LATE" not in text
    assert "ready without a core 25.0% of the time" in describe(summarize("x", 1, done), 1, 1.0)
    assert "without a core" not in describe(summarize("x", 1, quick), 1, 1.0)


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
