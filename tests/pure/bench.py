"""A scheduler to play with: real tree and pool, a runner that reads its answers through the pages, a recount after every step."""

from collections import deque
from typing import Any

from radixserve.config import SchedulerConfig
from radixserve.core import Request, RequestOutput, ScheduledBatch, TokenLogprob
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache
from tests.pure.helpers import CountingRunner


class NamedPages:
    """Which pages the steps under way read and write, from their batches alone: none of them may be free before the answer."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, dict[int, int]] = {}
        self._by_step: dict[int, set[int]] = {}

    def plan(self, batch: ScheduledBatch) -> None:
        for slot in batch.freed_slots:
            self._tables.pop(slot)
        named = self._by_step[batch.step] = set()
        for row in batch.rows:
            table = self._tables.setdefault(row.slot, {})
            for write in row.page_writes:
                table.update(enumerate(write.page_ids, write.first_page))
            named |= {table[page] for page in range(-(-(row.start + row.count) // self._page_size))}

    def drop(self, step: int) -> None:
        del self._by_step[step]

    def check(self, cache: Any) -> None:
        free = set(cache._pool.free_ids())
        for step, named in self._by_step.items():
            assert not named & free, f"pages {named & free} are free, and step {step} is not answered"


class Bench:
    """Scheduler, cache and counting runner; the account is recounted after every step."""

    def __init__(
        self,
        num_pages: int = 200,
        page_size: int = 1,
        chunk: int = 16,
        rows: int = 8,
        policy: str = "lpm",
        is_shared: bool = True,
        eos_token_ids: tuple[int, ...] = (1,),
        forced: int | None = None,
        plans_ahead: bool = False,
        eviction: str = "lru",
        **limits: Any,
    ) -> None:
        self.cache: PageCache = PrefixCache(num_pages, page_size, eviction) if is_shared else DisabledCache(num_pages, page_size)
        config = SchedulerConfig(schedule_policy=policy, chunked_prefill_size=chunk, max_running_requests=rows, **limits)
        self.scheduler = Scheduler(config, self.cache, 1000, frozenset(eos_token_ids), forced)
        self.runner = CountingRunner(num_pages, page_size)
        self._max_under_way = 2 if plans_ahead else 1
        self._under_way: deque[ScheduledBatch] = deque()
        self._named = NamedPages(page_size)
        self.num_planned_ahead = 0
        self.batches: list[ScheduledBatch] = []
        self.outputs: list[RequestOutput] = []
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one, self.now)

    def step(self) -> list[RequestOutput]:
        self.now += 1
        while len(self._under_way) < self._max_under_way and (batch := self.scheduler.schedule(self.now)) is not None:
            self.num_planned_ahead += bool(self._under_way)
            self.batches.append(batch)
            self._under_way.append(batch)
            self._named.plan(batch)
        self._named.check(self.cache)
        # as late as can be: whatever planning ahead did to the pages is done
        news = self._answer() if self._under_way else self.scheduler.take_outputs()
        self._named.check(self.cache)
        self.scheduler.check_account()
        self.outputs += news
        return news

    def _answer(self) -> list[RequestOutput]:
        batch = self._under_way.popleft()
        output = self.runner.execute(batch)
        news = self.scheduler.update(output, self.now)
        self._named.drop(batch.step)
        return news

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]

    def final_or_none(self, request_id: str) -> RequestOutput | None:
        finals = [output for output in self.outputs if output.request_id == request_id and output.is_final]
        assert len(finals) <= 1
        return finals[0] if finals else None

    def final(self, request_id: str) -> RequestOutput:
        final = self.final_or_none(request_id)
        assert final is not None
        return final

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprob]:
        return [one for output in self.outputs if output.request_id == request_id for one in output.prompt_logprobs]
