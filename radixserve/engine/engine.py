"""Engine: introduces scheduler and runner. One step is: schedule, submit, collect, update.

With a pipeline of two steps, the next one is scheduled and submitted before the one under way is collected (docs/decisions/009).
"""

import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from radixserve.config import EngineConfig
from radixserve.core import MAX_PIN_TTL_S, Request, RequestOutput, ScheduledBatch, StepOutput, is_in_vocabulary, wrong_token_error
from radixserve.engine.info import EngineInfo
from radixserve.engine.pipeline import OneByOne, Pipeline, Runner
from radixserve.engine.step_log import StepLog
from radixserve.engine.step_profile import StepProfile
from radixserve.errors import InvalidRequestError, UnsupportedFieldError, shown
from radixserve.metrics import EngineStats, StepSeconds
from radixserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _UnderWay:
    batch: ScheduledBatch
    start: float  # of its planning
    tree: float  # seconds of planning, spent in the tree and outside of it
    schedule: float


class Engine:
    """Not thread-safe: one loop calls add, abort, finish, flush_cache and step in turn."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        check_ranks: Callable[[], None] = lambda: None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """check_ranks raises EngineDeadError when a process that the runner needs has ended.

        pipeline: how steps reach the runner; None: one by one.
        """
        self.config = config
        self.info = info
        self._scheduler = scheduler
        self._pipeline = pipeline if pipeline is not None else OneByOne(runner)  # an empty one is false
        self._under_way: deque[_UnderWay] = deque()  # those in the pipeline
        self._news: list[RequestOutput] = []  # of steps that were collected outside of step()
        self._last_end = 0.0
        self._clock = clock
        self._check_ranks = check_ranks
        self._seconds = StepSeconds()
        self._log = StepLog(config.decode_log_interval, shows_chunk_size=config.scheduler.target_step_ms is not None)
        self._profile = StepProfile(config.profile_steps, is_overlapped=self._pipeline.max_steps > 1)
        self._was_checked = True  # nothing happened since the last recount

    @classmethod
    def build(cls, config: EngineConfig) -> "Engine":
        """Load the model, size the pool, make everything. Blocks for seconds. ModelError or ConfigError say what cannot be."""
        # OpenMP threads that spin for long while they wait starve whoever else needs a core; ones that sleep at once wake late and cost
        # a third of the speed (bench/LOG.md). So: a short spin. Read when torch loads its OpenMP library; the user's own setting wins.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        from radixserve.engine.build import build_engine

        return build_engine(config)

    def add(self, request: Request) -> None:
        """Accept a request, or raise a UserError that says why not."""
        start = self._clock()
        request.sampling.validate()
        _refuse_what_is_not_built(request)
        self._check_pin(request.pin_ttl_s)
        if not is_in_vocabulary(request.prompt_ids, self.info.vocab_size):
            raise wrong_token_error(request.prompt_ids, self.info.vocab_size)
        self._scheduler.add(request, start)
        self._was_checked = False
        self._seconds.schedule += self._clock() - start

    def _check_pin(self, ttl_s: float | None) -> None:
        if ttl_s is None:
            return
        if not 0 < ttl_s <= MAX_PIN_TTL_S:  # NaN too
            raise InvalidRequestError(f"ttl_s: expected a number of seconds in (0, {MAX_PIN_TTL_S:g}], got {ttl_s}", param="ttl_s")
        if self.config.cache.disable_radix_cache or not self.config.cache.max_pinned_fraction:
            why = "with --disable-radix-cache" if self.config.cache.disable_radix_cache else "at --max-pinned-fraction 0"
            raise UnsupportedFieldError(f"cache_control: nothing can be pinned {why}", param="cache_control")

    def abort(self, request_id: str) -> None:
        """End a request at the next step."""
        self._scheduler.abort(request_id)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by output token number num_output_tokens: end the request there."""
        self._scheduler.finish(request_id, num_output_tokens)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._news)

    def step(self) -> list[RequestOutput]:
        """Compute one batch, if there is one, and have the next one planned meanwhile where the pipeline takes two; returns all news."""
        # a step that is profiled has the engine to itself: its parts then add up
        max_steps = 1 if self._profile.is_on else self._pipeline.max_steps
        while len(self._under_way) < max_steps and self._submit():
            pass
        news, self._news = self._news, []
        return news + (self._collect() if self._under_way else self._scheduler.take_outputs())

    def _submit(self) -> bool:
        """Plan a step and hand it over; False if there is none to plan now."""
        cache = self._scheduler.cache
        start, tree_before = self._clock(), cache.seconds
        batch = self._scheduler.schedule(start)
        if batch is None:
            return False
        tree = cache.seconds - tree_before
        self._under_way.append(_UnderWay(batch, start, tree, self._clock() - start - tree))
        self._pipeline.submit(batch)
        return True

    def _collect(self) -> list[RequestOutput]:
        """Wait for the oldest step under way, and take in what it computed."""
        output = self._pipeline.collect()
        one, cache = self._under_way.popleft(), self._scheduler.cache
        batch = one.batch
        executed, tree_before = self._clock(), cache.seconds
        news = self._scheduler.update(output, executed)
        start = max(one.start, self._last_end)  # one that was planned ahead began behind the one before it
        self._log.after_step(batch, self.stats, executed - start)
        self._last_end = end = self._clock()
        tree_after = cache.seconds - tree_before
        tree, schedule = one.tree + tree_after, one.schedule + (end - executed) - tree_after
        self._measure(batch, output, tree, schedule, wall=end - start)
        goes_on = self._scheduler.has_work
        _tell(self._profile.add(batch, output.times, tree=tree, schedule=schedule, start=start, end=end, goes_on=goes_on))
        if self.config.check_account_every_step:
            self._scheduler.check_account()
        return news

    def _measure(self, batch: ScheduledBatch, output: StepOutput, tree: float, schedule: float, wall: float) -> None:
        seconds, totals = self._seconds, self._scheduler.totals
        seconds.tree += tree
        seconds.schedule += schedule
        seconds.plan += output.times.plan_s
        seconds.wait += output.times.wait_s
        seconds.forward += output.times.forward_s
        seconds.sample += output.times.sample_s
        if batch.num_decode_rows < len(batch.rows):
            totals.prefill_steps_total += 1
            totals.prefill_step_seconds += wall
            totals.prefill_step_decode_rows_total += batch.num_decode_rows
        else:
            totals.decode_steps_total += 1
            totals.decode_step_seconds += wall
            totals.decode_step_rows_total += len(batch.rows)

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests wait or run."""
        self._was_checked = False
        while self._under_way:
            self._news += self._collect()
        return self._scheduler.flush(self._clock())

    def check_idle(self) -> None:
        """Recount the account of pages if anything happened since the last time. Call when there is no work.

        EngineDeadError when a rank has ended.
        """
        self._check_ranks()
        if not self._was_checked and not self.has_work:
            self._scheduler.check_account()
            self._was_checked = True

    def close(self) -> None:
        """There will be no more steps: a profile that waits for some tells what it has."""
        _tell(self._profile.end())

    def stats(self) -> EngineStats:
        cache, page_size = self._scheduler.cache, self._scheduler.cache.page_size
        num_private = cache.num_pages - cache.num_free_pages - cache.num_evictable_pages - cache.num_locked_pages
        return dataclasses.replace(
            self._scheduler.totals,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            new_token_ratio=self._scheduler.new_token_ratio,
            max_prompt_tokens_per_step=self._scheduler.max_prompt_tokens,
            pool_tokens=cache.num_pages * page_size,
            free_tokens=cache.num_free_pages * page_size,
            evictable_tokens=cache.num_evictable_pages * page_size,
            locked_tokens=cache.num_locked_pages * page_size,
            pinned_tokens=cache.num_pinned_pages(self._clock()) * page_size,
            private_tokens=num_private * page_size,
            evicted_tokens_total=cache.num_evicted_pages * page_size,
            step_seconds=dataclasses.replace(self._seconds),
        )


def _tell(table: str) -> None:
    if table:
        print(table, file=sys.stderr, flush=True)


def _refuse_what_is_not_built(request: Request) -> None:
    if request.namespace.adapter:
        message = f"adapter: LoRA adapters are not supported by this engine, got {shown(request.namespace.adapter)}"
        raise UnsupportedFieldError(message, param="adapter")
