"""The names of the server's figures that are used here, and what its step times say of a run."""

from dataclasses import dataclass

from bench.metrics import Figures

PROMPT_TOKENS = "sglang:prompt_tokens_total"
CACHED_TOKENS = "sglang:cached_tokens_total"
PREFILL_TOKENS = "radixserve_prefill_tokens_total"
EVICTED_TOKENS = "sglang:evicted_tokens_total"
RETRACTED = "sglang:num_retracted_requests_total"
QUEUE_SECONDS = "sglang:queue_time_seconds"  # histogram
RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
POOL_TOKENS = "sglang:max_total_num_tokens"
EVICTABLE_TOKENS = "sglang:kv_evictable_tokens"
LOCKED_TOKENS = "radixserve_locked_tokens"
PRIVATE_TOKENS = "radixserve_private_tokens"
STEP_SECONDS = "radixserve_step_seconds_total"  # label part
PREFILL_STEP_SECONDS = "radixserve_prefill_step_seconds_total"
PREFILL_STEP_DECODE_ROWS = "radixserve_prefill_step_decode_rows_total"
DECODE_STEP_SECONDS = "radixserve_decode_step_seconds_total"
DECODE_STEP_ROWS = "radixserve_decode_step_rows_total"

COUNTERS = (
    PROMPT_TOKENS,
    CACHED_TOKENS,
    PREFILL_TOKENS,
    EVICTED_TOKENS,
    RETRACTED,
    QUEUE_SECONDS,
    STEP_SECONDS,
    PREFILL_STEP_SECONDS,
    PREFILL_STEP_DECODE_ROWS,
    DECODE_STEP_SECONDS,
    DECODE_STEP_ROWS,
)
GAUGES = (RUNNING, WAITING, POOL_TOKENS, EVICTABLE_TOKENS, LOCKED_TOKENS, PRIVATE_TOKENS)


def all_growth(before: Figures | None, after: Figures | None) -> Figures:
    """What each counter of COUNTERS gained, buckets of histograms left out; nothing where one side is missing."""
    if before is None or after is None:
        return {}
    kept = {name: value for name, value in after.items() if name.startswith(COUNTERS) and "_bucket" not in name}
    return {name: value - before.get(name, 0.0) for name, value in kept.items()}


@dataclass(frozen=True, slots=True)
class StepClock:
    """Seconds of the engine's steps in a run: by part ("tree", "schedule", "forward", ...), and by kind of step."""

    parts: dict[str, float]
    mixed_s: float = 0.0  # steps that held a prompt chunk
    mixed_decode_rows: float = 0.0  # decode rows that ran in them
    decode_s: float = 0.0  # steps of decode rows alone
    decode_rows: float = 0.0

    @classmethod
    def of(cls, counters: Figures) -> "StepClock":
        """From the growth of the counters; those that are not there count as nothing."""
        prefix = f'{STEP_SECONDS}{{part="'
        return cls(
            {name.removeprefix(prefix).rstrip('"}'): value for name, value in counters.items() if name.startswith(prefix)},
            counters.get(PREFILL_STEP_SECONDS, 0.0),
            counters.get(PREFILL_STEP_DECODE_ROWS, 0.0),
            counters.get(DECODE_STEP_SECONDS, 0.0),
            counters.get(DECODE_STEP_ROWS, 0.0),
        )

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def is_known(self) -> bool:
        return self.total_s > 0 and self.mixed_s > 0

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill. A decode row in a mixed step is taken off at what one costs in the steps of decode rows alone."""
        row_s = self.decode_s / self.decode_rows if self.decode_rows > 0 else 0.0
        return max(0.0, self.mixed_s - self.mixed_decode_rows * row_s)

    @property
    def prefill_share(self) -> float | None:
        """f: the share of prefill in the step time; None if unknown."""
        return self.prefill_s / self.total_s if self.is_known else None

    def share(self, *names: str) -> float | None:
        """Share of the named parts in the step time; None if there was no step."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.total_s if self.total_s > 0 else None
