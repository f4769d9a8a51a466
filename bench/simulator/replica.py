"""One server without a model: real scheduler, tree and pool; a clock that the cost model moves; answers from the trace."""

import heapq
from array import array
from dataclasses import dataclass

from bench.simulator.cost import CostModel, StepShape
from bench.simulator.load import END_OF_ANSWER, Load
from radixserve.config import SchedulerConfig
from radixserve.core import IntArray, RequestOutput, ScheduledBatch, StepOutput
from radixserve.errors import InvalidRequestError
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be compared. eviction: a name that PrefixCache knows, or "none" for no re-use at all."""

    scheduler: SchedulerConfig
    pool_tokens: int
    eviction: str = "lru"
    repeats_steps: bool = True  # plan runs of equal decode steps at once; the outcome is the same

    def make_cache(self, page_size: int) -> PageCache:
        num_pages = self.pool_tokens // page_size
        if num_pages < 1:
            raise ValueError(f"pool: expected at least one page of {page_size} tokens, got {self.pool_tokens} tokens")
        if self.eviction == "none":
            return DisabledCache(num_pages, page_size)
        try:
            return PrefixCache(num_pages, page_size, self.eviction)
        except KeyError as error:
            raise ValueError(f"eviction: expected a policy that PrefixCache knows, or none, got {self.eviction!r}") from error


@dataclass(slots=True)
class _Live:
    """A request that has run at least once."""

    number: int
    prompt_len: int
    output_len: int
    output_ids: IntArray | None
    num_output: int = 0

    @property
    def num_computed(self) -> int:
        """While it decodes: all but the token sampled last."""
        return self.prompt_len + self.num_output - 1

    def next_token(self) -> int:
        if self.output_ids is not None:
            return self.output_ids[self.num_output]
        return -self.number - 2  # nobody else's, and below every id of a prompt


class Replica:
    """Submit requests in order of arrival, then let it run; nothing happens before `until_s` that a later arrival could change."""

    def __init__(self, load: Load, settings: Settings, cost: CostModel) -> None:
        self._load = load
        self._settings = settings
        self._cost = cost
        self._page_size = load.trace.page_size
        self.cache = settings.make_cache(self._page_size)
        self.scheduler = Scheduler(settings.scheduler, self.cache, load.longest, frozenset([END_OF_ANSWER]))
        self._arrivals: list[int] = []  # heap of numbers: they are in order of arrival
        self._by_slot: dict[int, _Live] = {}
        self._live: dict[str, _Live] = {}
        self.now = 0.0
        self.num_steps = 0
        self.num_repeated_steps = 0
        self.num_done = 0  # ended or refused
        self.num_refused = 0
        self.num_hit_tokens = 0  # counted from the batches
        self.ttft_s = array("d")
        self.events = array("q")  # see bounds.py

    def submit(self, number: int) -> None:
        heapq.heappush(self._arrivals, number)

    def run_until(self, until_s: float) -> None:
        """Take all steps that begin before until_s."""
        while True:
            self._take_arrivals()
            if not self.scheduler.has_work:
                if not self._arrivals:
                    return
                self.now = self._load.arrival_s(self._arrivals[0])
                continue
            if self.now >= until_s:
                return
            self._step(until_s)

    def _take_arrivals(self) -> None:
        while self._arrivals and self._load.arrival_s(self._arrivals[0]) <= self.now:
            number = heapq.heappop(self._arrivals)
            try:
                self.scheduler.add(self._load.request(number), self._load.arrival_s(number))
            except InvalidRequestError:  # longer than the pool
                self.num_refused += 1
                self.num_done += 1

    def _step(self, until_s: float) -> None:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            outputs = self.scheduler.take_outputs()
            if not outputs:
                raise RuntimeError(f"{self.scheduler.num_waiting} requests wait and nothing is planned: the scheduler is stuck")
            self._note(outputs)
            return
        shape = StepShape.of(batch)
        self.now += self._cost.seconds(shape)
        self.num_steps += 1
        num_done = self.num_done
        answer = StepOutput(batch.step, self._answers(batch))
        self._note(self.scheduler.update(answer, self.now))
        if self._settings.repeats_steps and shape.prefill_tokens == 0 and self._stays_the_same(shape, self.num_done > num_done):
            self._repeat(until_s)

    def _answers(self, batch: ScheduledBatch) -> tuple[int, ...]:
        tokens = []
        for row in batch.rows:
            if row.request is not None:
                self._by_slot[row.slot] = self._see(row.request.request_id, row.start)
            if not row.is_sampled:
                tokens.append(-1)
                continue
            live = self._by_slot[row.slot]
            token = live.next_token()
            live.num_output += 1
            is_early_end = live.num_output == live.output_len and self._load.max_tokens is not None
            tokens.append(END_OF_ANSWER if is_early_end else token)
        return tuple(tokens)

    def _see(self, request_id: str, num_cached: int) -> _Live:
        """A request in a new slot; it may have been in one before, and retracted."""
        live = self._live.get(request_id)
        if live is None:
            number = int(request_id)
            load = self._load
            live = _Live(number, load.prompt_len(number), load.output_len(number), load.output_ids(number))
            self._live[request_id] = live
            self.num_hit_tokens += num_cached
            self.events.append(number + 1)
        return live

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.token_ids and output.num_output_tokens == len(output.token_ids):
                self.ttft_s.append(self.now - self._load.arrival_s(int(output.request_id)))
            if output.is_final:
                live = self._live.pop(output.request_id, None)
                if live is not None:
                    self.events.append(-live.number - 1)
                self.num_done += 1

    # ---- many steps at once

    def _stays_the_same(self, shape: StepShape, has_ended: bool) -> bool:
        """Whether the next steps are the last one again, until somebody ends, needs a page or comes."""
        config, scheduler = self._settings.scheduler, self.scheduler
        assert config.chunked_prefill_size is not None
        if shape.decode_rows >= config.chunked_prefill_size or scheduler.num_running == 0:
            return False  # a prompt may have been left out for want of budget
        if scheduler.num_waiting == 0:
            return True
        # who waits did not fit, and fits no better while nobody ends and no page changes hands; but an estimate of outputs may fall
        return not has_ended and (scheduler.num_running == config.max_running_requests or self._load.max_tokens is None)

    def _repeat(self, until_s: float) -> None:
        page_size = self._page_size
        limit = 1 << 30
        rows, context = 0, 0
        for live in self._live.values():
            if live.output_ids is not None:
                return  # each token is another; such traces are short
            num_computed = live.num_computed
            limit = min(limit, live.output_len - live.num_output - 1, -num_computed % page_size - 1)
            rows += 1
            context += num_computed + 1
        if limit <= 0 or rows != self.scheduler.num_running:  # some are retracted
            return
        until_s = min(until_s, self._load.arrival_s(self._arrivals[0]) if self._arrivals else until_s)
        num_steps = 0
        while num_steps < limit and self.now < until_s:
            # one by one, so that the clock is the same to the last bit
            self.now += self._cost.seconds(StepShape(0, 0, rows, context))
            context += rows
            num_steps += 1
        if num_steps:
            self.scheduler.repeat_decode(num_steps)
            self.num_repeated_steps += num_steps
            for live in self._live.values():
                live.num_output += num_steps
