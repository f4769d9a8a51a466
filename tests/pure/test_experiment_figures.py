"""The figures of an experiment against values worked out by hand from tests/support/recorded_experiment.py."""

import dataclasses

import pytest

from bench.experiment import figures as f
from bench.experiment.counters import StepClock, all_growth
from bench.experiment.lesson import GroupHits, lesson_in_words, perturbed_groups
from tests.support.recorded_experiment import failed, record, recorded_results, run

RESULTS = recorded_results()


def test_spread_over_repeats() -> None:
    spread = f.over_repeats([3.0, 1.0, 2.0])
    assert spread == f.Spread(2.0, 1.0, 3.0, (3.0, 1.0, 2.0))
    assert f.over_repeats([1.0, None]) is None
    assert f.over_repeats([]) is None


def test_quantiles_are_values_that_were_measured() -> None:
    assert f.quantiles([float(value) for value in range(100)]) == f.Quantiles(50.0, 95.0, 99.0)
    assert f.quantiles([7.0]) == f.Quantiles(7.0, 7.0, 7.0)
    assert f.quantiles([]) is None


def test_re_use_by_token_and_by_request() -> None:
    rates = f.hit_rates(RESULTS.runs_of("shared", "on")[0].records)
    assert rates == f.HitRates(360, 288, 0.8, 0.75)
    assert f.hit_rates([record("a", 0.1, None)]) is None
    assert f.hit_rates([record("a", 0.1, 50), failed("b")]) == f.HitRates(100, 50, 0.5, 1.0)
    assert f.hit_rates([]) is None


def test_the_bound_and_the_ratio_of_a_pair() -> None:
    """h = 0.8 and f = 0.75: at most 1 / (1 - 0.6) = 2.5 times faster."""
    first, second = f.pairs(RESULTS, "shared", "on")
    assert (first.time_ratio, second.time_ratio) == (2.2, 2.4)
    assert first.prefill_share == pytest.approx(0.75)
    assert first.bound == pytest.approx(2.5)
    assert first.ttft_ratio == pytest.approx(0.3 / 1.2)


def test_no_bound_where_the_baseline_re_uses_or_does_not_tell() -> None:
    first = f.pairs(RESULTS, "shared", "on")[0]
    assert dataclasses.replace(first, baseline=first.other).bound is None
    assert dataclasses.replace(first, baseline=dataclasses.replace(first.baseline, counters={})).bound is None


def test_a_pair_needs_both() -> None:
    runs = tuple(one for one in RESULTS.runs if (one.load, one.server, one.repeat) != ("shared", "on", 0))
    assert len(f.pairs(dataclasses.replace(RESULTS, runs=runs), "shared", "on")) == 1


def test_where_the_time_went() -> None:
    """4 s of steps in 4.4 s: 1 % tree and scheduler, the rest 3 : 1."""
    split = f.time_split(RESULTS.runs_of("shared", "off")[0])
    assert split is not None
    assert (split.prefill, split.decode) == (pytest.approx(2.97), pytest.approx(0.99))
    assert (split.bookkeeping, split.idle, split.total) == (pytest.approx(0.04), pytest.approx(0.4), pytest.approx(4.4))
    mean = f.mean_split(RESULTS.runs_of("shared", "off"))
    assert mean is not None
    assert mean.total == pytest.approx(4.6)
    assert f.mean_split([]) is f.time_split(run("x", "on", 0, 1.0, (), {})) is None


def test_decode_rows_of_mixed_steps_are_no_prefill() -> None:
    """80 s of mixed steps with 100 decode rows in them, which cost 0.1 s each in the steps of their own."""
    clock = StepClock({"forward": 100.0}, mixed_s=80.0, mixed_decode_rows=100, decode_s=20.0, decode_rows=200)
    assert clock.prefill_share == pytest.approx(0.7)
    assert StepClock({}).prefill_share is StepClock({}).share("tree") is None


def test_the_step_clock_is_read_from_what_counters_gained() -> None:
    before = {
        'radixserve_step_seconds_total{part="tree"}': 1.0,
        "radixserve_prefill_step_seconds_total": 2.0,
        "sglang:queue_time_seconds_bucket": 1.0,
    }
    after = {name: value + 0.5 for name, value in before.items()} | {"sglang:num_running_reqs": 3.0}
    gained = all_growth(before, after)
    assert gained == {'radixserve_step_seconds_total{part="tree"}': 0.5, "radixserve_prefill_step_seconds_total": 0.5}
    assert StepClock.of(gained) == StepClock({"tree": 0.5}, mixed_s=0.5)
    assert all_growth(None, after) == all_growth(before, None) == {}


def test_prefilled_tokens_by_counter_or_by_what_was_not_re_used() -> None:
    one = RESULTS.runs_of("shared", "on")[0]
    assert f.prefilled_tokens(one) == 72
    assert f.prefilled_tokens(dataclasses.replace(one, counters={})) == 72
    assert f.prefilled_tokens(run("x", "on", 0, 1.0, (record("a", 0.1, None),), {})) is None


def test_rates_latency_and_queue() -> None:
    one = RESULTS.runs_of("shared", "on")[0]
    assert f.output_rate(one) == 12 / 2.0
    assert f.request_rate(one) == 2.0
    assert f.queue_mean_s(one) == pytest.approx(0.1)
    assert f.tpot_p50(one) == pytest.approx(0.05)
    assert f.ttft_quantile("p50")(one) == pytest.approx(0.3)
    assert f.gap_quantile("p99")(one) == pytest.approx(0.05)
    assert f.ttft_quantile("p50")(run("x", "on", 0, 1.0, (failed("a"),), {})) is None


def test_the_pool_in_shares() -> None:
    one = RESULTS.runs_of("shared", "on")[0]
    assert f.pool_samples(one) == [(0.0, 0.0, 0.0), (1.0, 0.4, 0.1)]
    assert (f.peak_pool_use(one), f.peak_pool_cached(one)) == (0.4, 0.1)
    assert f.peak_pool_use(dataclasses.replace(one, samples=())) is None


def test_goodput_needs_both_limits_and_counts_failures() -> None:
    limits = RESULTS.plan.limits
    assert f.is_good(record("a", 0.5, 0), limits)
    assert not f.is_good(record("a", 0.51, 0), limits)
    assert not f.is_good(record("a", 0.1, 0, gaps=(0.15,)), limits)
    assert f.is_good(record("a", 0.1, 0, gaps=()), limits)
    off = RESULTS.runs_of("rising", "off", 1.0)[0]
    assert (f.good_share(off, limits), f.goodput(off, limits)) == (0.9, pytest.approx(0.9))


def test_the_rate_that_is_sustained() -> None:
    assert f.sustained_rate(RESULTS, "rising", "on", (1.0, 2.0)) == 2.0
    assert f.sustained_rate(RESULTS, "rising", "off", (1.0, 2.0)) == 1.0
    assert f.sustained_rate(RESULTS, "rising", "off", (2.0,)) is None


def test_counts_of_client_and_server() -> None:
    one = RESULTS.runs_of("shared", "on")[0]
    assert f.counts_agree(one) is True
    assert f.counts_agree(dataclasses.replace(one, counters={"sglang:cached_tokens_total": 287.0})) is False
    assert f.counts_agree(dataclasses.replace(one, counters={})) is None


def test_the_lesson_is_said_only_if_the_figures_show_it() -> None:
    groups = perturbed_groups(RESULTS, "on")
    assert groups == [GroupHits("timestamp", 0.0, 0.6, 0.6)]
    said = lesson_in_words(groups)
    assert said.startswith(
        "**What changes belongs at the end of a prompt.** Changed at the front, 0.0 % of the prompt tokens were re-used; with "
    )
    assert "moved to the end 60.0 %, where the ideal is 60.0 %" in said
    other = lesson_in_words([GroupHits("newline", 0.4, 0.6, 0.6), *groups])
    assert "belongs at the end" not in other
    assert "`newline` keeps 40.0 % even at the front" in other
    assert "belongs at the end" not in lesson_in_words([GroupHits("timestamp", 0.0, 0.3, 0.6)])
    assert lesson_in_words([GroupHits("timestamp", 0.0, None, 0.0)]) == lesson_in_words([]) == ""
