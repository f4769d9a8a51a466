"""From single requests to figures: one RunSummary per run of a load, its line on the terminal, its line in a JSONL file."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.metrics import CACHED_TOKENS, growth
from bench.records import RunResult, percentile

LATE_S = 0.02  # a p99 of lateness above this changes a load of tens of requests per second
BUSY = 0.8  # of a core
WORST = ("late_p99", "late_max", "generator_gc_max", "generator_cpu_share")  # one run that was sent late is enough to doubt the figures
ABOVE_IDEAL = 0.02  # a hit rate that much above the ideal is no beginning that is alike by chance


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of one load. Times in seconds; None where the server does not tell. Failed requests count in `failed` alone.

    in_tok counts prompt tokens as built here, served_in_tok as the server saw them; they differ where a server adds tokens of its own.
    hit_rate is cached_tok / served_in_tok: the share of prompt tokens that were re-used. ideal_hit_rate is that of a pool without end; None
    for chats, whose template adds tokens that the workload does not know. core_wait: how long the generator was ready and had no core.
    """

    label: str
    workload: str
    mode: str
    seed: int
    requests: int
    failed: int
    wall_s: float
    in_tok: int
    out_tok: int
    in_tok_s: float
    out_tok_s: float
    requests_s: float
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_max: float | None
    cached_tok: int | None
    served_in_tok: int | None
    hit_rate: float | None
    ideal_hit_rate: float | None
    cached_requests: int | None  # requests that re-used anything
    counted_cached_tok: float | None  # what the server's own counter gained: other traffic shows here
    late_p50: float  # how long after its time a request was sent
    late_p99: float
    late_max: float
    generator_cpu_share: float  # of one core
    generator_cpu_per_request: float
    generator_gc_max: float
    generator_core_wait: float | None


def summarize(label: str, seed: int, result: RunResult) -> RunSummary:
    """Figures of one run."""
    records, wall_s = result.served, result.wall_s
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [gap for record in records for gap in record.gaps_s]
    tpots = [record.tpot_s for record in records if record.tpot_s is not None]
    cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
    served = [record.prompt_tokens for record in records if record.prompt_tokens is not None]
    in_tok = sum(record.prompt_len if record.prompt_len is not None else record.prompt_tokens or 0 for record in records)
    out_tok = sum(record.output_tokens for record in records)
    return RunSummary(
        label=label,
        workload=result.workload,
        mode=result.mode,
        seed=seed,
        requests=len(records),
        failed=len(result.errors),
        wall_s=wall_s,
        in_tok=in_tok,
        out_tok=out_tok,
        in_tok_s=in_tok / wall_s,
        out_tok_s=out_tok / wall_s,
        requests_s=len(records) / wall_s,
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p95=percentile(ttfts, 0.95),
        ttft_p99=percentile(ttfts, 0.99),
        tpot_p50=percentile(tpots, 0.5),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        itl_max=max(gaps, default=None),
        cached_tok=sum(cached) if cached else None,
        served_in_tok=sum(served) if served else None,
        hit_rate=sum(cached) / sum(served) if cached and served else None,
        ideal_hit_rate=result.ideal_hit_rate,
        cached_requests=sum(count > 0 for count in cached) if cached else None,
        counted_cached_tok=growth(result.metrics_before, result.metrics_after, *CACHED_TOKENS),
        late_p50=result.overhead.late_p50_s,
        late_p99=result.overhead.late_p99_s,
        late_max=result.overhead.late_max_s,
        generator_cpu_share=result.overhead.cpu_share,
        generator_cpu_per_request=result.overhead.cpu_per_request_s,
        generator_gc_max=result.overhead.gc_max_s,
        generator_core_wait=result.overhead.core_wait_s,
    )


def medians(results: Sequence[RunSummary]) -> RunSummary:
    """Field by field the median over runs of one load, of lateness and its causes the worst run.

    What is no figure, and the seed, are the first run's.
    """
    merged = {}
    for spec in dataclasses.fields(RunSummary):
        values = [getattr(result, spec.name) for result in results]
        is_measured = spec.name not in ("label", "workload", "mode", "seed") and None not in values
        over_runs = max if spec.name in WORST else statistics.median
        merged[spec.name] = over_runs(values) if is_measured else values[0]
    return RunSummary(**merged)


def spread(values: Sequence[float]) -> float:
    """Largest over smallest: 1.0 is perfectly steady."""
    return max(values) / min(values)


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.1f} %"


def describe(result: RunSummary, num_runs: int, wall_spread: float) -> str:
    """A few lines for a person."""
    ttft = "/".join(map(_ms, (result.ttft_p50, result.ttft_p95, result.ttft_p99)))
    itl = "/".join(map(_ms, (result.itl_p50, result.itl_p95, result.itl_max)))
    cached = "the server does not tell"
    if result.cached_tok is not None:
        cached = f"{result.cached_tok:.0f} of {result.served_in_tok or result.in_tok:.0f}"
        if result.counted_cached_tok is not None and result.counted_cached_tok != result.cached_tok:
            cached += f" (the server's counter says {result.counted_cached_tok:.0f}: is there other traffic?)"
    failed = f", {result.failed:.0f} FAILED" if result.failed else ""
    lines = [
        f"== {result.label}  load {result.workload}, {result.mode}: {result.requests:.0f} requests{failed}, {num_runs} run(s), "
        f"spread {wall_spread:.2f}",
        f"   total {result.wall_s:.2f} s   {result.requests_s:.2f} requests/s   in {result.in_tok_s:.1f} tok/s   "
        f"out {result.out_tok_s:.1f} tok/s ({result.out_tok:.0f} tokens)",
        f"   TTFT p50/p95/p99 {ttft} ms   time per output token p50 {_ms(result.tpot_p50)} ms",
        f"   inter-token latency p50/p95/max {itl} ms",
        f"   cached prompt tokens {cached}; token hit rate {_percent(result.hit_rate)} ({_ideal(result)})",
        _generator(result),
    ]
    return "\n".join(lines)


def _ideal(result: RunSummary) -> str:
    if result.ideal_hit_rate is None:
        return "no ideal: a chat template's tokens are among them"
    if result.hit_rate is not None and result.hit_rate > result.ideal_hit_rate + ABOVE_IDEAL:
        known = "ABOVE IT, so the server knew these prompts from before; use --flush, or another --seed"
        return f"ideal {_percent(result.ideal_hit_rate)}: {known}"
    return f"ideal {_percent(result.ideal_hit_rate)}"


def _generator(result: RunSummary) -> str:
    """Its own cost, and a loud word where the load was not the one that was asked for."""
    late = "/".join(map(_ms, (result.late_p50, result.late_p99, result.late_max)))
    line = (
        f"   generator: sent late by p50/p99/max {late} ms; {result.generator_cpu_per_request * 1e3:.2f} ms CPU per request, "
        f"{result.generator_cpu_share:.1%} of a core"
    )
    if result.generator_core_wait is not None:
        line += f"; ready without a core {result.generator_core_wait / result.wall_s:.1%} of the time"
    if result.late_p99 <= LATE_S:
        return line
    if result.generator_gc_max > 0.5 * result.late_max:
        why = f"its garbage collector held it for {_ms(result.generator_gc_max)} ms"
    elif result.generator_cpu_share > BUSY:
        why = "it needs more than the core that it has: lower the rate, or run several generators"
    else:
        why = "other work held its core, or the machine stood still"
    return f"{line}\n   SENT LATE: the generator was a bottleneck, so the load was not quite the one asked for; {why}"


def append_jsonl(path: Path, record: object) -> None:
    """Append a dataclass instance, or a dict, as one JSON line."""
    data = dataclasses.asdict(record) if dataclasses.is_dataclass(record) and not isinstance(record, type) else record
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(data) + "\n")
