"""Offline batches shaped like the SGLang paper's workloads: lpm re-uses what the best order re-uses; the ablations' order."""

import statistics

import pytest

from bench.offline import Setting, run, small_pool
from bench.paper_workloads import PAPER_WORKLOADS, depth_first, ideal_hit_tokens, make_batch
from tests.pure.helpers import CountingRunner


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_lpm_hits_within_one_percent_of_the_best_depth_first_order(name: str) -> None:
    """Theorem 3.1 of the paper, with a pool of a tenth of what there is: the best order computes every distinct token once."""
    batch = make_batch(name)
    setting = Setting(small_pool(batch, 0.1))
    best = run(batch, "best", setting, CountingRunner(setting.pool_tokens, 1))
    assert best.prompt_tokens == sum(map(len, batch))
    assert best.cached_tokens == ideal_hit_tokens(batch)
    lpm = run(batch, "lpm", setting, CountingRunner(setting.pool_tokens, 1))
    assert 0.99 * best.rate <= lpm.rate <= best.rate
    assert run(batch, "dfs-weight", setting).rate >= 0.99 * best.rate


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_with_four_at_once_and_the_wait_bounded_96_percent_are_left(name: str) -> None:
    """On average, as in the paper, over four batches each; and none falls far below."""
    shares = []
    for seed in range(4):
        batch = make_batch(name, seed)
        setting = Setting(small_pool(batch, 0.1), rows=4, max_overtaken=64)
        shares.append(run(batch, "lpm", setting).rate / run(batch, "best", setting).rate)
    assert statistics.mean(shares) >= 0.96
    assert min(shares) >= 0.92


def test_ablations_come_out_in_the_papers_order() -> None:
    """lpm > fcfs > random > no tree: all together, and none reversed in any one that does not come in random order anyway."""
    totals = dict.fromkeys(("lpm", "fcfs", "random", "no tree"), 0)
    for name in PAPER_WORKLOADS:
        batch = make_batch(name)
        setting = Setting(small_pool(batch, 0.1))
        hits = {arm: run(batch, arm, setting).cached_tokens for arm in totals}
        assert hits["lpm"] >= hits["fcfs"] > hits["no tree"] == 0, name
        assert hits["lpm"] >= hits["random"] > 0, name
        assert hits["fcfs"] >= hits["random"] or name in ("generative-agents", "dspy-rag"), name
        for arm, tokens in hits.items():
            totals[arm] += tokens
    assert totals["lpm"] > 1.1 * totals["fcfs"]
    assert totals["fcfs"] > 1.1 * totals["random"]


def test_ideal_counts_each_distinct_token_once() -> None:
    batch = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [9]]
    assert depth_first(batch) == [[5, 6, 7], [5, 6, 7], [5, 6, 8], [9]]
    assert ideal_hit_tokens(batch) == 2 + 2


def test_batches_are_seeded() -> None:
    assert make_batch("react", 1) == make_batch("react", 1) != make_batch("react", 2)
    with pytest.raises(ValueError, match="expected one of mmlu"):
        make_batch("nothing")
