"""Results of an experiment with figures that can be worked out by hand: made without servers, for what reads results."""

from typing import Any

from bench.experiment.plan import parse_plan
from bench.experiment.results import Results, Run, Sample, ServerInfo, TtftResult
from bench.records import RequestRecord

PLAN: dict[str, Any] = {
    "title": "A recorded experiment",
    "about": "Made by hand.",
    "repeats": 2,
    "baseline": "off",
    "headline": "shared",
    "servers": [{"label": "on"}, {"label": "off", "flags": ["--disable-radix-cache"]}],
    "loads": [
        {"label": "shared", "workload": "shared-prefix", "concurrency": 2},
        {"label": "random", "workload": "random", "concurrency": 2},
        {"label": "changed", "workload": "perturbed", "concurrency": 2},
        {"label": "rising", "workload": "random", "rates": [1, 2], "repeats": 1},
    ],
    "limits": {"ttft_ms": 500, "tpot_ms": 100},
    "ttft": {"server": "on", "pairs": [[1000, 800]]},
}


def record(
    name: str, ttft_s: float, cached: int | None, *, prompt: int = 100, gaps: tuple[float, ...] = (0.05, 0.05), group: str = "g"
) -> RequestRecord:
    """Sent one second after the start; three tokens unless `gaps` says otherwise."""
    times = [1.0 + ttft_s]
    for gap in gaps:
        times.append(times[-1] + gap)
    return RequestRecord(name, group, 1.0, 1.0, times[0], tuple(times), times[-1], prompt, cached, len(times))


def failed(name: str) -> RequestRecord:
    return RequestRecord(name, "g", 1.0, 1.0, None, (), 2.0, None, None, 0, "RequestFailedError: HTTP 503")


def counters(cached: int, prefilled: int, *, mixed_s: float, decode_s: float, evicted: int = 0) -> dict[str, float]:
    """A step takes 1 % for tree and scheduler; no decode row in a mixed step."""
    total = mixed_s + decode_s
    return {
        "sglang:cached_tokens_total": float(cached),
        "radixserve_prefill_tokens_total": float(prefilled),
        "sglang:evicted_tokens_total": float(evicted),
        "sglang:num_retracted_requests_total": 0.0,
        "sglang:queue_time_seconds_sum": 0.4,
        "sglang:queue_time_seconds_count": 4.0,
        'radixserve_step_seconds_total{part="tree"}': total * 0.004,
        'radixserve_step_seconds_total{part="schedule"}': total * 0.006,
        'radixserve_step_seconds_total{part="forward"}': total * 0.99,
        "radixserve_prefill_step_seconds_total": mixed_s,
        "radixserve_prefill_step_decode_rows_total": 0.0,
        "radixserve_decode_step_seconds_total": decode_s,
        "radixserve_decode_step_rows_total": 10.0,
    }


def sample(at_s: float, used: float, cached: float) -> Sample:
    """used and cached in tokens of a pool of 1,000; half of what is used is the tree's."""
    figures = {
        "sglang:max_total_num_tokens": 1000.0,
        "radixserve_locked_tokens": used / 2,
        "radixserve_private_tokens": used / 2,
        "sglang:kv_evictable_tokens": cached,
    }
    return Sample(at_s, figures)


def run(
    load: str, server: str, repeat: int, wall_s: float, records: tuple[RequestRecord, ...], gained: dict[str, float], **more: Any
) -> Run:
    more = {"ideal_hit_rate": 0.0, "ideal_by_group": {}, "samples": (sample(0.0, 0, 0), sample(1.0, 400, 100)), "rate": None, **more}
    return Run(load=load, server=server, repeat=repeat, seed=1 + repeat, wall_s=wall_s, records=records, counters=gained, **more)


def _shared(repeat: int, off_wall_s: float) -> list[Run]:
    """h = 0.8; off spends 75 % of its steps on prefill, so the bound is 1 / (1 - 0.6) = 2.5."""
    on = tuple(record(f"r{index}", 0.1 * (index + 1), 0 if index == 0 else 96, prompt=90) for index in range(4))
    off = tuple(record(f"r{index}", 0.4 * (index + 1), 0, prompt=90) for index in range(4))
    return [
        run("shared", "on", repeat, 2.0, on, counters(288, 72, mixed_s=1.0, decode_s=0.9), ideal_hit_rate=0.8),
        run("shared", "off", repeat, off_wall_s, off, counters(0, 360, mixed_s=3.0, decode_s=1.0), ideal_hit_rate=0.8),
    ]


def _random(repeat: int) -> list[Run]:
    records = tuple(record(f"r{index}", 0.2, 0) for index in range(4))
    gained = counters(0, 400, mixed_s=2.0, decode_s=0.5, evicted=50)
    return [run("random", server, repeat, 3.0, records, gained) for server in ("on", "off")]


def _changed(repeat: int) -> list[Run]:
    def records(end: int) -> tuple[RequestRecord, ...]:
        return tuple(
            record(f"{where}{index}", 0.2, end if where == "end" and index else 0, group=f"timestamp/{where}")
            for where in ("front", "end")
            for index in range(4)
        )

    ideal = {"timestamp/front": 0.0, "timestamp/end": 0.6}
    return [
        run(
            "changed",
            "on",
            repeat,
            2.0,
            records(80),
            counters(240, 560, mixed_s=1.0, decode_s=0.5),
            ideal_hit_rate=0.3,
            ideal_by_group=ideal,
        ),
        run(
            "changed", "off", repeat, 2.5, records(0), counters(0, 800, mixed_s=1.5, decode_s=0.5), ideal_hit_rate=0.3, ideal_by_group=ideal
        ),
    ]


def _rising(rate: float, off_ttft_s: float) -> list[Run]:
    """Of ten requests `on` serves all in time; of off's the last fails."""
    on = tuple(record(f"r{index}", 0.1, 0) for index in range(10))
    off = (*(record(f"r{index}", off_ttft_s, 0) for index in range(9)), failed("r9"))
    gained = counters(0, 1000, mixed_s=2.0, decode_s=0.5)
    return [run("rising", "on", 0, 10.0 / rate, on, gained, rate=rate), run("rising", "off", 0, 10.0 / rate, off, gained, rate=rate)]


def recorded_results() -> Results:
    runs = [
        *_shared(0, 4.4),
        *_shared(1, 4.8),
        *_random(0),
        *_random(1),
        *_changed(0),
        *_changed(1),
        *_rising(1.0, 0.2),
        *_rising(2.0, 0.9),
    ]
    return Results(
        parse_plan(PLAN),
        "python -m bench.experiment plan.toml",
        "2026-11-30 10:00",
        120.0,
        {"processor": "a slide rule", "packages": "radixserve 0.1.0"},
        (ServerInfo("on", "radixserve serve", "0.1.0"), ServerInfo("off", "radixserve serve --disable-radix-cache", "0.1.0")),
        tuple(runs),
        (TtftResult(1000, 800, 5, 1.0, 0.25, cached_tokens=800.0, floor=0.2, cold_step_s=0.9, hit_step_s=0.2, hit_server_s=0.23),),
    )
