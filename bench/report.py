"""From single requests to figures: one RunResult per run of a load, its line on the terminal, its line in a JSONL file."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.client import Completion
from bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one load. Times in seconds; None where the server does not tell.

    in_tok counts prompt tokens as built here, served_in_tok as the server saw them; they differ where a server adds tokens of its own.
    hit_rate is cached_tok / served_in_tok: the share of prompt tokens that were re-used. ideal_hit_rate is that of a pool without end.
    """

    label: str
    workload: str
    seed: int
    requests: int
    wall_s: float
    in_tok: int
    out_tok: int
    in_tok_s: float
    out_tok_s: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_max: float | None
    cached_tok: int | None
    served_in_tok: int | None
    hit_rate: float | None
    ideal_hit_rate: float
    cached_requests: int | None  # requests that re-used anything


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank from above: the value at index floor(share * n) of the sorted values, at most the last; None of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def summarize(label: str, workload: Workload, seed: int, in_tok: int, wall_s: float, completions: Sequence[Completion]) -> RunResult:
    """Figures of one run. `in_tok`: prompt tokens sent; `completions` is not empty."""
    ttfts = sorted(completion.ttft for completion in completions)
    gaps = [gap for completion in completions for gap in completion.gaps]
    tpots = [completion.tpot for completion in completions if completion.tpot is not None]
    cached = [completion.num_cached_tokens for completion in completions if completion.num_cached_tokens is not None]
    served = [completion.num_prompt_tokens for completion in completions if completion.num_prompt_tokens is not None]
    out_tok = sum(completion.num_output_tokens for completion in completions)
    return RunResult(
        label=label,
        workload=workload.name,
        seed=seed,
        requests=len(completions),
        wall_s=wall_s,
        in_tok=in_tok,
        out_tok=out_tok,
        in_tok_s=in_tok / wall_s,
        out_tok_s=out_tok / wall_s,
        ttft_p50=percentile(ttfts, 0.5) or 0.0,
        ttft_p95=percentile(ttfts, 0.95) or 0.0,
        tpot_p50=statistics.median(tpots) if tpots else None,
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        itl_max=max(gaps, default=None),
        cached_tok=sum(cached) if cached else None,
        served_in_tok=sum(served) if served else None,
        hit_rate=sum(cached) / sum(served) if cached and served else None,
        ideal_hit_rate=workload.ideal_hit_tokens / workload.prompt_tokens,
        cached_requests=sum(count > 0 for count in cached) if cached else None,
    )


def medians(results: Sequence[RunResult]) -> RunResult:
    """Field by field the median over runs of one load; label, workload and seed are the first run's."""
    merged = {}
    for spec in dataclasses.fields(RunResult):
        values = [getattr(result, spec.name) for result in results]
        is_measured = spec.name not in ("label", "workload", "seed") and None not in values
        merged[spec.name] = statistics.median(values) if is_measured else values[0]
    return RunResult(**merged)


def spread(values: Sequence[float]) -> float:
    """Largest over smallest: 1.0 is perfectly steady."""
    return max(values) / min(values)


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.1f} %"


def describe(result: RunResult, num_runs: int, wall_spread: float) -> str:
    """A few lines for a person."""
    ttft = "/".join(map(_ms, (result.ttft_p50, result.ttft_p95)))
    itl = "/".join(map(_ms, (result.itl_p50, result.itl_p95, result.itl_max)))
    cached = "the server does not tell"
    if result.cached_tok is not None:
        cached = f"{result.cached_tok:.0f} of {result.served_in_tok or result.in_tok:.0f}"
    lines = [
        f"== {result.label}  load {result.workload}: {result.requests:.0f} requests, {num_runs} run(s), spread {wall_spread:.2f}",
        f"   total {result.wall_s:.2f} s   in {result.in_tok_s:.1f} tok/s   out {result.out_tok_s:.1f} tok/s ({result.out_tok:.0f} tokens)",
        f"   TTFT p50/p95 {ttft} ms   time per output token p50 {_ms(result.tpot_p50)} ms",
        f"   inter-token latency p50/p95/max {itl} ms",
        f"   cached prompt tokens {cached}; token hit rate {_percent(result.hit_rate)} (ideal {_percent(result.ideal_hit_rate)})",
    ]
    return "\n".join(lines)


def append_jsonl(path: Path, record: object) -> None:
    """Append a dataclass instance, or a dict, as one JSON line."""
    data = dataclasses.asdict(record) if dataclasses.is_dataclass(record) and not isinstance(record, type) else record
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(data) + "\n")
