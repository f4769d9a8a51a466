"""From recorded requests to figures: of one run, over repeats, of two servers pair by pair. Pure; every formula stands in one place.

Repeats are summed up as median, least and greatest. Ratios are taken pair by pair (the same prompts, right after each other) and only then
summed up, so that a drift of the machine meets both sides of each.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.experiment.counters import (
    CACHED_TOKENS,
    EVICTABLE_TOKENS,
    EVICTED_TOKENS,
    LOCKED_TOKENS,
    POOL_TOKENS,
    PREFILL_TOKENS,
    PRIVATE_TOKENS,
    QUEUE_SECONDS,
    RETRACTED,
    StepClock,
)
from bench.experiment.plan import Limits
from bench.experiment.results import Results, Run
from bench.records import RequestRecord, percentile

Seconds = float


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]


def over_repeats(values: Sequence[float | None]) -> Spread | None:
    """None if a repeat does not have the figure, or there is no repeat."""
    known = tuple(value for value in values if value is not None)
    if not known or len(known) < len(values):
        return None
    return Spread(statistics.median(known), min(known), max(known), known)


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p95: float
    p99: float


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """None of nothing."""
    if not values:
        return None
    p50, p95, p99 = (percentile(values, share) for share in (0.50, 0.95, 0.99))
    assert p50 is not None and p95 is not None and p99 is not None
    return Quantiles(p50, p95, p99)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of a run went, in seconds. Bookkeeping is tree and scheduler, and is not in prefill and decode."""

    prefill: float
    decode: float
    bookkeeping: float
    idle: float  # no step ran: nothing to do, or time spent in HTTP and client

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.bookkeeping + self.idle


def time_split(run: Run) -> TimeSplit | None:
    """None where the server does not tell its step times."""
    clock = StepClock.of(run.counters)
    if clock.total_s <= 0:
        return None
    bookkeeping = clock.parts.get("tree", 0.0) + clock.parts.get("schedule", 0.0)
    steps = clock.mixed_s + clock.decode_s
    # a step's wall time holds its share of the bookkeeping
    model = max(0.0, steps - bookkeeping)
    prefill = model * min(1.0, clock.prefill_s / steps) if steps else 0.0
    return TimeSplit(prefill, model - prefill, bookkeeping, max(0.0, run.wall_s - steps))


def mean_split(runs: Sequence[Run]) -> TimeSplit | None:
    """The mean of each part over runs, so that the parts still add up; None if one of them does not tell, or there is none."""
    splits = [split for run in runs if (split := time_split(run)) is not None]
    if not splits or len(splits) < len(runs):
        return None
    return TimeSplit(*(statistics.fmean(getattr(split, part) for split in splits) for part in ("prefill", "decode", "bookkeeping", "idle")))


@dataclass(frozen=True, slots=True)
class HitRates:
    """Re-use of some requests. `token_rate` is cached over prompt tokens; for `request_rate` one cached token makes a request a hit."""

    prompt_tokens: int
    cached_tokens: int
    token_rate: float
    request_rate: float


def hit_rates(records: Sequence[RequestRecord]) -> HitRates | None:
    """None where the server does not tell, or nothing was served."""
    told = [(record.prompt_tokens, record.cached_tokens) for record in records if record.error is None]
    known = [(prompt, cached) for prompt, cached in told if prompt is not None and cached is not None]
    prompt_tokens = sum(prompt for prompt, _ in known)
    if len(known) < len(told) or not prompt_tokens:
        return None
    cached_tokens = sum(cached for _, cached in known)
    return HitRates(prompt_tokens, cached_tokens, cached_tokens / prompt_tokens, sum(cached > 0 for _, cached in known) / len(known))


def prefilled_tokens(run: Run) -> float | None:
    """Prompt positions really computed: the server's own count, else what it did not take from its cache."""
    if PREFILL_TOKENS in run.counters:
        return run.counters[PREFILL_TOKENS]
    rates = hit_rates(run.records)
    return None if rates is None else float(rates.prompt_tokens - rates.cached_tokens)


def ttfts(run: Run) -> list[Seconds]:
    return [ttft for record in run.records if (ttft := record.ttft_s) is not None]


def token_gaps(run: Run) -> list[Seconds]:
    return [gap for record in run.served for gap in record.gaps_s]


def ttft_quantile(name: str) -> Callable[[Run], float | None]:
    """name: p50, p95 or p99."""
    return lambda run: None if (found := quantiles(ttfts(run))) is None else float(getattr(found, name))


def gap_quantile(name: str) -> Callable[[Run], float | None]:
    return lambda run: None if (found := quantiles(token_gaps(run))) is None else float(getattr(found, name))


def tpot_p50(run: Run) -> float | None:
    return percentile([tpot for record in run.records if (tpot := record.tpot_s) is not None], 0.5)


def output_rate(run: Run) -> float:
    """Output tokens per second."""
    return sum(record.output_tokens for record in run.served) / run.wall_s


def request_rate(run: Run) -> float:
    return len(run.served) / run.wall_s


def queue_mean_s(run: Run) -> float | None:
    """Mean wait from arrival at the scheduler to first admission, by the server's histogram."""
    count = run.counters.get(f"{QUEUE_SECONDS}_count", 0.0)
    return run.counters[f"{QUEUE_SECONDS}_sum"] / count if count else None


def evicted(run: Run) -> float | None:
    return run.counters.get(EVICTED_TOKENS)


def retracted(run: Run) -> float | None:
    return run.counters.get(RETRACTED)


def peak_pool_use(run: Run) -> float | None:
    """Largest share of the pool that running requests held, of what was sampled."""
    return max((used for _, used, _ in pool_samples(run)), default=None)


def peak_pool_cached(run: Run) -> float | None:
    return max((cached for _, _, cached in pool_samples(run)), default=None)


def pool_samples(run: Run) -> list[tuple[Seconds, float, float]]:
    """(when, share of the pool held by running requests, share that is cached and free to go)."""
    return [
        (
            sample.at_s,
            (sample.figures.get(LOCKED_TOKENS, 0.0) + sample.figures.get(PRIVATE_TOKENS, 0.0)) / pool,
            sample.figures.get(EVICTABLE_TOKENS, 0.0) / pool,
        )
        for sample in run.samples
        if (pool := sample.figures.get(POOL_TOKENS, 0.0)) > 0
    ]


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Served, and within both limits; a request of one output token has only the first."""
    ttft, tpot = record.ttft_s, record.tpot_s
    return ttft is not None and ttft * 1e3 <= limits.ttft_ms and (tpot is None or tpot * 1e3 <= limits.tpot_ms)


def good_share(run: Run, limits: Limits) -> float:
    """A failed request is not a good one."""
    return sum(is_good(record, limits) for record in run.records) / len(run.records) if run.records else 0.0


def goodput(run: Run, limits: Limits) -> float:
    """Good requests per second."""
    return good_share(run, limits) * len(run.records) / run.wall_s


def sustained_rate(results: Results, load: str, server: str, rates: Sequence[float]) -> float | None:
    """The highest of `rates` up to which, in the median, at least limits.share of the requests were good at every rate; None if none."""
    sustained = None
    for rate in sorted(rates):
        share = over_repeats([good_share(run, results.plan.limits) for run in results.runs_of(load, server, rate)])
        if share is None or share.median < results.plan.limits.share:
            break
        sustained = rate
    return sustained


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts on the baseline and on another server, one right after the other."""

    baseline: Run
    other: Run

    @property
    def time_ratio(self) -> float:
        """Total time of the baseline over that of the other: how many times faster the other is."""
        return self.baseline.wall_s / self.other.wall_s

    @property
    def ttft_ratio(self) -> float | None:
        """The other's median time to first token over the baseline's: below 1 is sooner."""
        ours, theirs = quantiles(ttfts(self.other)), quantiles(ttfts(self.baseline))
        return ours.p50 / theirs.p50 if ours and theirs and theirs.p50 > 0 else None

    @property
    def prefill_share(self) -> float | None:
        """f: prefill in the step time of the baseline."""
        return StepClock.of(self.baseline.counters).prefill_share

    @property
    def bound(self) -> float | None:
        """1 / (1 - h f), with h the other's token hit rate; None unless the baseline re-uses nothing and tells its step times."""
        ours, theirs = hit_rates(self.other.records), hit_rates(self.baseline.records)
        share = self.prefill_share
        if ours is None or theirs is None or theirs.cached_tokens or share is None:
            return None
        return 1.0 / (1.0 - ours.token_rate * share)


def pairs(results: Results, load: str, server: str, rate: float | None = None) -> list[Pair]:
    """`server` against the plan's baseline, repeat by repeat."""
    others = {run.repeat: run for run in results.runs_of(load, server, rate)}
    return [Pair(run, others[run.repeat]) for run in results.runs_of(load, results.plan.baseline, rate) if run.repeat in others]


def unsteadiness(results: Results) -> tuple[str, float] | None:
    """The closed load whose baseline runs differ most in total time, and greatest over least: equal work, so it is the machine."""
    spreads = [
        (load.label, spread.high / spread.low)
        for load in results.closed_loads
        if (spread := over_repeats([run.wall_s for run in results.runs_of(load.label, results.plan.baseline)])) and len(spread.values) > 1
    ]
    return max(spreads, key=lambda pair: pair[1], default=None)


def counts_agree(run: Run) -> bool | None:
    """Whether the cached tokens that the client added up are what the server's counter gained; None where one side does not tell."""
    rates = hit_rates(run.records)
    if rates is None or CACHED_TOKENS not in run.counters or len(run.served) < len(run.records):
        return None
    return rates.cached_tokens == run.counters[CACHED_TOKENS]
