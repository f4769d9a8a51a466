"""What a run leaves: one record per request, the whole as RunResult, and both as JSON lines. Knows nothing of sockets."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.metrics import CACHED_TOKENS, Figures, growth

NOT_SENT = "not sent, since "  # how the error of a request begins that waited for one that failed


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it. Seconds since the run began; token counts are the server's, None where it does not tell.

    scheduled_s: when it ought to be sent: its place in the arrival process, the end of what it waits for, or in a closed loop the moment
    that its turn came. token_times_s has one entry per token, as far as the server says how many tokens a chunk holds; those that come in
    one chunk share the pause before it, and those of the first chunk come together. prompt_len: tokens as built here; None: text was sent,
    or a chat, whose template adds tokens: prompt_tokens has them.
    """

    id: str
    group: str
    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    token_times_s: tuple[float, ...]
    done_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    error: str | None = None
    text: str | None = field(default=None, repr=False)
    prompt_len: int | None = None

    @property
    def was_sent(self) -> bool:
        return self.error is None or not self.error.startswith(NOT_SENT)

    @property
    def late_s(self) -> float:
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From its own sending to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first) / (tokens - 1); None for one token."""
        if self.error is not None or not self.token_times_s or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies."""
        return tuple(later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:]))


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the generator itself cost. late_*: how long after its time a request was sent; cpu_s: of this process, in the run.

    gc_max_s: its longest garbage collection. core_wait_s: how long it was ready and had no core; None where the system does not tell.
    """

    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    cpu_s: float
    cpu_share: float  # of one core
    cpu_per_request_s: float
    gc_max_s: float = 0.0
    core_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one workload. records are in the workload's order, one per request. metrics_*: None where the server has none.

    ideal_hit_rate: None for chats, whose template adds tokens that the workload does not know.
    """

    workload: str
    mode: str  # e.g. "8 at a time"
    wall_s: float
    ideal_hit_rate: float | None
    records: tuple[RequestRecord, ...]
    metrics_before: Figures | None
    metrics_after: Figures | None
    overhead: Overhead

    @property
    def served(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def errors(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]

    @property
    def cached_tokens(self) -> int | None:
        """Re-used prompt tokens of all requests; None if the server does not tell of each."""
        counts = [record.cached_tokens for record in self.served]
        return None if not counts or None in counts else sum(count for count in counts if count is not None)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest ranks, as in numpy and so in the figures of vLLM's and SGLang's own benches; None of nothing."""
    if not values:
        return None
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(values) - 1)] - ordered[low]) * (at - low)


def with_zeros(records: Sequence[RequestRecord], before: Figures | None, after: Figures | None) -> tuple[RequestRecord, ...]:
    """Records in which an answer that re-used nothing says 0. vLLM and SGLang leave the field out of such an answer, so where others of
    the run have it, or the server's own counter gained nothing, one without it is a 0. Else it stays unknown."""
    tells = any(record.cached_tokens is not None for record in records) or growth(before, after, *CACHED_TOKENS) == 0
    return tuple(
        dataclasses.replace(record, cached_tokens=0)
        if tells and record.cached_tokens is None and record.prompt_tokens is not None
        else record
        for record in records
    )


def overhead_of(
    records: Sequence[RequestRecord], cpu_s: float, wall_s: float, gc_max_s: float = 0.0, core_wait_s: float | None = None
) -> Overhead:
    """Of the requests that were sent; there is one."""
    late = [record.late_s for record in records if record.was_sent]
    p50, p99 = percentile(late, 0.5) or 0.0, percentile(late, 0.99) or 0.0
    return Overhead(p50, p99, max(late), cpu_s, cpu_s / wall_s, cpu_s / len(late), gc_max_s, core_wait_s)


def append_records(path: Path, result: RunResult, **labels: object) -> None:
    """One JSON line per request: the labels and the workload's name, then the record. Without the text; times to a microsecond."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in result.records:
            values = {spec.name: getattr(record, spec.name) for spec in dataclasses.fields(record) if spec.name != "text"}
            line = {**labels, "workload": result.workload, "mode": result.mode, **{name: _rounded(value) for name, value in values.items()}}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    return [round(one, 6) for one in value] if isinstance(value, tuple) else value
