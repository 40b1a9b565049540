"""Success rates and means over seeds with honest intervals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import make_rollout

from acrlpd.evaluation.statistics import RATES, mean_over_seeds, summarize, wilson_interval

Z = 1.959963984540054


def test_known_intervals() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(25, 50) == pytest.approx((0.36644, 0.63356), abs=1e-5)
    assert wilson_interval(50, 50) == pytest.approx((0.92865, 1.0), abs=1e-5)


@given(st.integers(1, 500), st.data())
def test_interval_ends_are_where_the_normal_test_turns(trials: int, data: st.DataObject) -> None:
    """At each end p of the interval the observed rate is exactly z standard errors (of p) away."""
    successes = data.draw(st.integers(0, trials))
    rate = successes / trials
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= rate <= high <= 1
    for end in (low, high):
        if end not in (0.0, 1.0):
            assert abs(rate - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / trials), abs=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_counts_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(successes, trials)


def test_summary() -> None:
    rollouts = [make_rollout(rewards=[-1, -1, 0], success=True), make_rollout(rewards=[-1] * 5, success=False)]
    summary = summarize(rollouts, lost_episodes=1)
    assert (summary.episodes, summary.successes, summary.success_rate) == (2, 1, 0.5)
    assert (summary.mean_return, summary.std_return) == (-3.5, 1.5)
    assert (summary.min_return, summary.max_return) == (-5.0, -2.0)
    assert (summary.mean_length, summary.mean_success_length, summary.lost_episodes) == (4.0, 3.0, 1)
    assert summary.interval == wilson_interval(1, 2)
    assert summarize(rollouts[1:]).mean_success_length is None
    with pytest.raises(ValueError, match="no episode"):
        summarize([], lost_episodes=3)


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262)])
def test_the_interval_over_seeds_has_students_quantile(seeds: int, quantile: float) -> None:
    """Quantiles as printed tables have them, for a two-sided 95 % with seeds - 1 degrees of freedom."""
    values = np.random.default_rng(seeds).normal(size=seeds)
    found = mean_over_seeds(values.tolist())
    error = values.std(ddof=1) / math.sqrt(seeds)
    low, high = found.interval
    assert found.mean == pytest.approx(values.mean())
    assert ((found.mean - low) / error, (high - found.mean) / error) == pytest.approx((quantile, quantile), abs=5e-4)


def test_known_means_over_seeds() -> None:
    """2 +- 4.30265 / sqrt(3) by hand; a rate stays inside [0, 1]; one seed has no spread; equal seeds have none."""
    assert mean_over_seeds([1.0, 2.0, 3.0]).interval == pytest.approx((-0.48414, 4.48414), abs=1e-5)
    assert mean_over_seeds([0.88, 0.84], RATES).interval == (pytest.approx(0.60588, abs=1e-5), 1.0)
    assert mean_over_seeds([0.02, 0.1], RATES).interval == (0.0, pytest.approx(0.56825, abs=1e-5))
    assert (mean_over_seeds([0.3]).mean, mean_over_seeds([0.3]).interval) == (0.3, None)
    assert mean_over_seeds([0.1, 0.1, 0.1]).interval == (0.1, 0.1)
    with pytest.raises(ValueError, match="no seed"):
        mean_over_seeds([])


def test_nineteen_of_twenty_intervals_over_seeds_hold_the_mean() -> None:
    draws = np.random.default_rng(0).normal(0.5, 0.1, size=(4000, 3))
    intervals = [mean_over_seeds(row).interval for row in draws.tolist()]
    assert np.mean([low <= 0.5 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.01)
