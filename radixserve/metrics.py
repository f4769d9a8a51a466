"""What the engine counts, as plain data. The Prometheus exporter (server/) and the log lines read it; nothing here knows HTTP."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StepSeconds:
    """Seconds spent in each part of all steps so far."""

    tree: float = 0.0  # match, lock, insert, evict; without what watches it
    schedule: float = 0.0  # the rest of planning and of bookkeeping
    plan: float = 0.0  # batch tensors and kernel planning
    wait: float = 0.0  # in planning ahead: until a GPU has read an earlier step's tables
    forward: float = 0.0
    sample: float = 0.0
    send: float = 0.0  # encode and hand over to the socket

    @property
    def total(self) -> float:
        return self.tree + self.schedule + self.plan + self.wait + self.forward + self.sample + self.send


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Gauges are of now; names ending in _total only grow. Token figures of the pool are pages * page size."""

    num_running: int = 0
    num_waiting: int = 0
    pool_tokens: int = 0
    free_tokens: int = 0
    evictable_tokens: int = 0
    locked_tokens: int = 0
    pinned_tokens: int = 0  # kept for a time by cache_control or /pin; evictable or locked all the same
    private_tokens: int = 0  # pages held by running requests alone
    new_token_ratio: float = 0.0  # share of max_tokens that running requests are expected to use
    max_prompt_tokens_per_step: int = 0
    prompt_tokens_total: int = 0  # of admitted requests, once each
    cached_tokens_total: int = 0  # of those, re-used
    generation_tokens_total: int = 0
    prefill_tokens_total: int = 0  # prompt positions really computed
    evicted_tokens_total: int = 0
    requests_total: int = 0  # accepted
    finished_total: int = 0
    aborted_total: int = 0
    timed_out_total: int = 0
    retracted_total: int = 0
    pool_exhausted_total: int = 0  # requests that ended since no page could be had for them
    prefill_steps_total: int = 0
    decode_steps_total: int = 0
    step_seconds: StepSeconds = field(default_factory=StepSeconds)
    prefill_step_seconds: float = 0.0  # wall time of steps that held a prompt chunk, their decode rows included
    prefill_step_decode_rows_total: int = 0  # those decode rows
    decode_step_seconds: float = 0.0  # wall time of steps of decode rows alone
    decode_step_rows_total: int = 0

    def without_gauges(self) -> "EngineStats":
        """What stays true of an engine that has ended: its counters."""
        return EngineStats(**{name: getattr(self, name) for name in _COUNTERS})

    def plus_counters_of(self, earlier: "EngineStats") -> "EngineStats":
        """This snapshot with the counters of engines that ran before on top: no counter falls when an engine is replaced."""
        return dataclasses.replace(self, **{name: _sum(getattr(self, name), getattr(earlier, name)) for name in _COUNTERS})

    @property
    def token_usage(self) -> float:
        """Share of the pool that cannot be taken right now: cached but unlocked KV does not count as used."""
        used = self.locked_tokens + self.private_tokens
        return used / self.pool_tokens if self.pool_tokens else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of all prompt tokens so far that was re-used. For a window, divide the growth of the two counters."""
        return self.cached_tokens_total / self.prompt_tokens_total if self.prompt_tokens_total else 0.0


_COUNTERS = tuple(spec.name for spec in dataclasses.fields(EngineStats) if spec.name.endswith(("_total", "_seconds")))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, StepSeconds):
        return StepSeconds(*(getattr(one, spec.name) + getattr(other, spec.name) for spec in dataclasses.fields(StepSeconds)))
    return one + other
