"""Offline batches shaped like the SGLang paper's workloads: lpm re-uses what the best order re-uses; the ablations' order."""

import statistics

import pytest

from bench.offline import Setting, run, small_pool
from bench.paper_workloads import PAPER_WORKLOADS, depth_first, ideal_hit_tokens, make_batch
from tests.pure.helpers import CountingRunner

SEEDS = range(4)


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_lpm_hits_within_one_percent_of_the_best_depth_first_order(name: str) -> None:
    """Theorem 3.1 of the paper, with a pool of a tenth of what there is: the best order computes every distinct token once."""
    for seed in SEEDS:
        batch = make_batch(name, seed)
        setting = Setting(small_pool(batch, 0.1))
        best = run(batch, "best", setting, CountingRunner(setting.pool_tokens, 1))
        assert best.prompt_tokens == sum(map(len, batch))
        assert best.cached_tokens == ideal_hit_tokens(batch)
        lpm = run(batch, "lpm", setting, CountingRunner(setting.pool_tokens, 1))
        assert 0.99 * best.rate <= lpm.rate <= best.rate
        assert run(batch, "dfs-weight", setting).rate >= 0.99 * best.rate


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_with_four_at_once_and_the_wait_bounded_96_percent_are_left(name: str) -> None:
    """On average, as in the paper, over four batches each; in each of them but where the wait's bound bites hardest."""
    shares = []
    for seed in SEEDS:
        batch = make_batch(name, seed)
        setting = Setting(small_pool(batch, 0.1), rows=4, max_overtaken=64)
        shares.append(run(batch, "lpm", setting).rate / run(batch, "best", setting).rate)
    assert statistics.mean(shares) >= 0.96
    # generative-agents: 0.94 to 0.99; of its five headers, each with its own waiting calls, four run at once
    assert min(shares) >= (0.92 if name == "generative-agents" else 0.98)


@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_ablations_come_out_in_the_papers_order(name: str) -> None:
    """lpm > fcfs >= random > no tree, in every workload.

    The calls of generative-agents and the questions of dspy-rag come in random order by themselves, so fcfs is one more random order there:
    equal in the mean over eight batches, either ahead in a single one. hellaswag has one header and few endings: every order is as good.
    """
    comes_in_random_order = name in ("generative-agents", "dspy-rag")
    rates = []
    for seed in range(8) if comes_in_random_order else SEEDS:
        batch = make_batch(name, seed)
        setting = Setting(small_pool(batch, 0.1))
        rates.append({arm: run(batch, arm, setting).rate for arm in ("lpm", "fcfs", "random", "no tree")})
    for each in rates:
        assert each["lpm"] >= each["fcfs"] if name == "hellaswag" else each["lpm"] > 1.04 * each["fcfs"]
        assert each["fcfs"] >= each["random"] or comes_in_random_order
        assert min(each["fcfs"], each["random"]) > each["no tree"] == 0
    if comes_in_random_order:
        ahead = [each["fcfs"] - each["random"] for each in rates]
        assert statistics.mean(ahead) > -3 * statistics.stdev(ahead) / len(ahead) ** 0.5


def test_ideal_counts_each_distinct_token_once() -> None:
    batch = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [9]]
    assert depth_first(batch) == [[5, 6, 7], [5, 6, 7], [5, 6, 8], [9]]
    assert ideal_hit_tokens(batch) == 2 + 2


def test_batches_are_seeded() -> None:
    assert make_batch("react", 1) == make_batch("react", 1) != make_batch("react", 2)
    with pytest.raises(ValueError, match="expected one of mmlu"):
        make_batch("nothing")
