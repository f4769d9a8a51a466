"""What a replica, and a fleet of them, did: counts, and times to first token."""

import dataclasses
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from bench.records import percentile
from bench.simulator.bounds import best_hits
from bench.simulator.load import Load
from bench.simulator.replica import Replica


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over replicas, but makespan_s: when the last one came to an end. cpu_s is of this machine, all other seconds are virtual."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    repeated_steps: int = 0
    bound_tokens: int = 0  # of an eviction that knows the future, replica by replica, on the same requests; 0 where not asked for
    ceiling_tokens: int = 0  # of caches without end, replica by replica
    makespan_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        sums = {spec.name: getattr(self, spec.name) + getattr(other, spec.name) for spec in dataclasses.fields(self)}
        return Counts(**{**sums, "makespan_s": max(self.makespan_s, other.makespan_s)})


@dataclass(frozen=True, slots=True)
class Result:
    counts: Counts
    ttft_s: "array[float]"

    @property
    def hit_rate(self) -> float:
        return self.counts.hit_tokens / max(self.counts.prompt_tokens, 1)

    def ttft_percentiles(self) -> tuple[float, float, float]:
        """p50, p90, p99 in seconds."""
        ordered = sorted(self.ttft_s)
        p50, p90, p99 = (percentile(ordered, share) or 0.0 for share in (0.5, 0.9, 0.99))
        return p50, p90, p99

    def to_bytes(self) -> bytes:
        header = json.dumps(dataclasses.asdict(self.counts)).encode()
        return len(header).to_bytes(4, "little") + header + self.ttft_s.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Result":
        end = 4 + int.from_bytes(data[:4], "little")
        ttft_s = array("d")
        ttft_s.frombytes(data[end:])
        return cls(Counts(**json.loads(data[4:end])), ttft_s)

    @classmethod
    def merged(cls, results: Sequence["Result"]) -> "Result":
        ttft_s = array("d")
        for result in results:
            ttft_s.extend(result.ttft_s)
        return cls(sum((result.counts for result in results), Counts()), ttft_s)


def result_of(replica: Replica, load: Load, with_bounds: bool) -> Result:
    """`replica` has come to its end."""
    totals, page_size = replica.scheduler.totals, load.trace.page_size
    assert not replica.scheduler.has_work
    bound = ceiling = 0
    if with_bounds:
        bound = best_hits(load, replica.events, replica.cache.num_pages) * page_size
        ceiling = best_hits(load, replica.events, None) * page_size
    counts = Counts(
        requests=totals.finished_total,
        refused=replica.num_refused,
        prompt_tokens=totals.prompt_tokens_total,
        hit_tokens=totals.cached_tokens_total,
        prefilled_tokens=totals.prefill_tokens_total,
        generated_tokens=totals.generation_tokens_total,
        evicted_tokens=replica.cache.num_evicted_pages * page_size,
        retractions=totals.retracted_total,
        steps=replica.num_steps + replica.num_repeated_steps,
        repeated_steps=replica.num_repeated_steps,
        bound_tokens=bound,
        ceiling_tokens=ceiling,
        makespan_s=replica.now,
    )
    return Result(counts, replica.ttft_s)
