"""A scheduler to play with: real tree and pool, a runner that reads its answers through the pages, a recount after every step."""

from typing import Any

from radixserve.config import SchedulerConfig
from radixserve.core import Request, RequestOutput, ScheduledBatch, TokenLogprob
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache
from tests.pure.helpers import CountingRunner


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
        eviction: str = "lru",
        **limits: Any,
    ) -> None:
        self.cache: PageCache = PrefixCache(num_pages, page_size, eviction) if is_shared else DisabledCache(num_pages, page_size)
        config = SchedulerConfig(schedule_policy=policy, chunked_prefill_size=chunk, max_running_requests=rows, **limits)
        self.scheduler = Scheduler(config, self.cache, 1000, frozenset(eos_token_ids), forced)
        self.runner = CountingRunner(num_pages, page_size)
        self.batches: list[ScheduledBatch] = []
        self.outputs: list[RequestOutput] = []
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one, self.now)

    def step(self) -> list[RequestOutput]:
        self.now += 1
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            news = self.scheduler.take_outputs()
        else:
            self.batches.append(batch)
            news = self.scheduler.update(self.runner.execute(batch), self.now)
        self.scheduler.check_account()
        self.outputs += news
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
