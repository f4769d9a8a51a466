"""Hit rates of offline batches by waiting order: `python -m bench.offline`. Exact token counts from the real scheduler, tree and pool;
no model, no clock. All prompts are there at once; each asks for one token.
"""

import argparse
import random
from array import array
from dataclasses import dataclass
from typing import Protocol

from bench.paper_workloads import PAPER_WORKLOADS, Batch, depth_first, ideal_hit_tokens, make_batch
from radixserve.config import SchedulerConfig
from radixserve.core import Request, SamplingParams, ScheduledBatch, StepOutput
from radixserve.scheduler.order.ranking import Rules
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache

ARMS = ("best", "lpm", "dfs-weight", "cost", "fcfs", "random", "no tree")


class Runner(Protocol):
    def execute(self, batch: ScheduledBatch) -> StepOutput: ...


class ConstantRunner:
    """Answers 2 to everything."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        return StepOutput(batch.step, tuple(2 if row.is_sampled else -1 for row in batch.rows))


@dataclass(frozen=True, slots=True)
class Setting:
    """pool_tokens holds at least the longest prompt and an answer."""

    pool_tokens: int
    rows: int = 1
    chunk: int = 512
    max_overtaken: int = 10**9


@dataclass(frozen=True, slots=True)
class Hits:
    prompt_tokens: int
    cached_tokens: int  # at admission

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def random_order(seed: int) -> Rules:
    rng = random.Random(seed)
    return Rules(lambda state: (rng.random(), state.arrival), lambda key, depth: key)


def run(batch: Batch, arm: str, setting: Setting, runner: Runner | None = None) -> Hits:
    """arm: one of ARMS. best: depth first over the batch's own tree, as it would come from somebody who knows it all."""
    if arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}, got {arm!r}")
    policy = arm if arm in ("lpm", "dfs-weight", "cost") else "fcfs"
    config = SchedulerConfig(
        schedule_policy=policy,
        chunked_prefill_size=setting.chunk,
        max_running_requests=setting.rows,
        lpm_max_overtaken=setting.max_overtaken,
    )
    cache: PageCache = DisabledCache(setting.pool_tokens) if arm == "no tree" else PrefixCache(setting.pool_tokens)
    rules = random_order(0) if arm == "random" else None
    scheduler = Scheduler(config, cache, context_length=setting.pool_tokens, rules=rules)
    for index, prompt in enumerate(depth_first(batch) if arm == "best" else batch):
        scheduler.add(Request(str(index), array("i", prompt), SamplingParams(max_tokens=1)), 0.0)
    runner = runner or ConstantRunner()
    now = 0.0
    while scheduler.has_work:
        now += 1
        planned = scheduler.schedule(now)
        assert planned is not None
        scheduler.update(runner.execute(planned), now)
    return Hits(scheduler.totals.prompt_tokens_total, scheduler.totals.cached_tokens_total)


def small_pool(batch: Batch, fraction: float) -> int:
    """A pool of so much of what the batch's own tree holds, and at least its longest prompt twice."""
    distinct = sum(map(len, batch)) - ideal_hit_tokens(batch)
    return max(int(distinct * fraction), 2 * max(map(len, batch)) + 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.offline", description="Hit rates of offline batches by waiting order.")
    parser.add_argument("--fraction", type=float, default=0.1, help="pool, as a share of the distinct tokens of a batch")
    parser.add_argument("--rows", type=int, default=1, help="requests that run at once")
    parser.add_argument("--max-overtaken", type=int, default=10**9, help="the hard bound of the wait (default: off)")
    parser.add_argument("--workloads", default=",".join(PAPER_WORKLOADS))
    args = parser.parse_args()
    print("| workload | prompts | pool | ideal | " + " | ".join(ARMS) + " |\n" + "|---" * (len(ARMS) + 4) + "|")
    for name in args.workloads.split(","):
        batch = make_batch(name)
        pool = small_pool(batch, args.fraction)
        setting = Setting(pool, args.rows, max_overtaken=args.max_overtaken)
        rates = [run(batch, arm, setting).rate for arm in ARMS]
        ideal = ideal_hit_tokens(batch) / sum(map(len, batch))
        print(f"| {name} | {len(batch)} | {pool} | {ideal:.3f} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |", flush=True)


if __name__ == "__main__":
    main()
