"""The soak in short (make soak runs it for ten minutes): see tests/support/soak.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from radixserve.config import EVICTION_CHOICES
from tests.support.soak import SET_UPS, SetUp, Soak

SHORT = (
    SetUp(1, True, "adaptive", "dfs-weight"),
    SetUp(16, True, "priority", "cost"),
    SetUp(4, False, "lru", "fcfs"),
    SetUp(1, True, "lru", "lpm", overlap="on"),
)


@pytest.mark.parametrize("set_up", SHORT, ids=str)
def test_soak(tiny_model: Callable[[str, bool], Path], set_up: SetUp) -> None:
    report = Soak(tiny_model("llama", True), set_up, seed=set_up.page_size).run_for(seconds=5.0)
    assert report.num_ended > 100
    assert report.num_aborted > 5
    assert report.num_retracted > 20
    assert report.num_preempted > 0
    assert (report.num_cached_tokens > 0) == set_up.is_tree_on
    assert (report.num_pins > 0) == set_up.is_tree_on
    assert report.num_near_ties <= 1 + report.num_ended // 100


def test_make_soak_runs_every_policy() -> None:
    assert {set_up.eviction for set_up in SET_UPS if set_up.is_tree_on} == set(EVICTION_CHOICES)
    assert {set_up.waiting for set_up in SET_UPS} == {"lpm", "fcfs", "dfs-weight", "cost"}
