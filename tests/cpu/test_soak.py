"""The soak in short (make soak runs it for ten minutes): see tests/support/soak.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.soak import Soak


@pytest.mark.parametrize(
    ("page_size", "is_tree_on", "seconds"), [(1, True, 25.0), (16, True, 10.0), (4, False, 10.0)], ids=["page-1", "page-16", "no-tree"]
)
def test_soak(tiny_model: Callable[[str, bool], Path], page_size: int, is_tree_on: bool, seconds: float) -> None:
    report = Soak(tiny_model("llama", True), page_size, is_tree_on, seed=page_size).run_for(seconds)
    assert report.num_ended > 100
    assert report.num_aborted > 5
    assert report.num_retracted > 20
    assert (report.num_cached_tokens > 0) == is_tree_on
    assert report.num_near_ties <= 1 + report.num_ended // 100
