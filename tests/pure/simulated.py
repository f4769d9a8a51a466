"""Small loads for the simulator, and a replica that runs one to its end."""

import random
from array import array

from bench.simulator.cost import modelled_h100_8b
from bench.simulator.fleet import FOREVER
from bench.simulator.load import Load
from bench.simulator.replica import Replica, Settings
from bench.simulator.trace import MOONCAKE_BLOCK, Trace, TraceRequest
from radixserve.config import SchedulerConfig

COST = modelled_h100_8b()


def conversations(num_requests: int, seed: int, mean_blocks: int = 6) -> Trace:
    """Mooncake-like: one common block, conversations that grow by turns, one-off prompts between them."""
    rng = random.Random(seed)
    histories: list[list[int]] = []
    requests, next_id, now = [], 1, 0.0
    for _ in range(num_requests):
        if not histories or rng.random() < 0.4:
            histories.append([0])
        history = histories[rng.randrange(max(0, len(histories) - 12), len(histories))]
        grown = rng.randint(1, mean_blocks)
        history.extend(range(next_id, next_id + grown))
        next_id += grown
        prompt_len = len(history) * MOONCAKE_BLOCK - rng.choice((0, 1, 100, 511))
        requests.append(TraceRequest(now, prompt_len, rng.randint(1, 300), array("i", history)))
        if prompt_len % MOONCAKE_BLOCK:
            history.pop()  # the partial block is another one in the next turn
        now += rng.expovariate(4.0)
    return Trace("test", MOONCAKE_BLOCK, tuple(requests))


def settings(pool_blocks: int = 400, order: str = "lpm", eviction: str = "lru", rows: int = 16, **more: bool) -> Settings:
    scheduler = SchedulerConfig(schedule_policy=order, chunked_prefill_size=2048, max_running_requests=rows)
    return Settings(scheduler, pool_blocks * MOONCAKE_BLOCK, eviction, **more)


def run_alone(load: Load, one: Settings) -> Replica:
    replica = Replica(load, one, COST)
    for number in range(load.num_requests):
        replica.submit(number)
    replica.run_until(FOREVER)
    replica.scheduler.check_account()
    return replica
