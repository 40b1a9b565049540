"""Success rates with honest intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import make_rollout

from acrlpd.evaluation.statistics import summarize, wilson_interval

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
    assert (summary.mean_length, summary.mean_success_length, summary.lost_episodes) == (4.0, 3.0, 1)
    assert summary.interval == wilson_interval(1, 2)
    assert summarize(rollouts[1:]).mean_success_length is None
    with pytest.raises(ValueError, match="no episode"):
        summarize([], lost_episodes=3)
