"""Requests, their places in the waiting order and their pages go without cycles: full collections may be seldom (engine/garbage.py)."""

import gc

import pytest

from tests.pure.bench import Bench
from tests.pure.helpers import request


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
def test_who_is_gone_leaves_no_cycles(policy: str) -> None:
    bench = Bench(policy=policy, num_pages=120)  # a pool so small that the tree evicts too
    stem = list(range(2, 62))
    gc.collect()
    gc.disable()
    try:
        for index in range(60):
            bench.add(request(str(index), [*stem[: index % 40], *range(100 + index, 170)], max_tokens=3))
        for index in range(20, 60, 3):
            bench.scheduler.abort(str(index))
        bench.drain()
        assert bench.cache.num_evicted_pages > 0
        num_found = gc.collect()
    finally:
        gc.enable()
    assert num_found < 60, f"{num_found} objects of 60 requests could only be found by the collector"
