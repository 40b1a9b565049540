"""The critic's values against what happened."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import make_rollout
from scipy.stats import spearmanr

from acrlpd.config import RewardConfig
from acrlpd.evaluation.statistics import best_of_n_effect, calibrate, discounted_returns, training_rewards

REWARDS = RewardConfig(kind="minus_one_zero")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0, 1))
def test_discounted_returns(rewards: list[float], discount: float) -> None:
    found = discounted_returns(np.array(rewards), discount)
    for t in range(len(rewards)):
        expected = sum(discount**i * reward for i, reward in enumerate(rewards[t:]))
        assert found[t] == pytest.approx(expected, abs=1e-6)


def test_a_perfect_critic_has_no_error() -> None:
    rewards = [-1.0, -1.0, -1.0, -1.0, 0.0]
    returns = discounted_returns(np.array(rewards), 0.9)
    result = calibrate([make_rollout(rewards, True, q=returns[::2], chunk=2)], REWARDS, 0.9)
    assert result is not None
    assert result.chunks == 3
    assert (result.bias, result.rmse) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert result.correlation == pytest.approx(1.0)
    assert [b.predicted for b in result.bins] == pytest.approx([b.realised for b in result.bins])


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=20))
def test_the_rank_correlation_is_spearmans(chunks: list[tuple[int, int]]) -> None:
    """One chunk per episode, whose only reward is its return; ties on both sides."""
    predicted, realised = zip(*chunks, strict=True)
    rollouts = [make_rollout([float(r)], True, q=[float(q)]) for q, r in chunks]
    result = calibrate(rollouts, RewardConfig(), 0.9)
    assert result is not None
    if len(set(predicted)) == 1 or len(set(realised)) == 1:
        assert result.rank_correlation is None
    else:
        assert result.rank_correlation == pytest.approx(spearmanr(predicted, realised).statistic)


def test_ranks_do_not_depend_on_the_scale_of_the_values() -> None:
    rewards = [-1.0, -1.0, -1.0, 0.0]
    returns = discounted_returns(np.array(rewards), 0.9)
    result = calibrate([make_rollout(rewards, True, q=np.exp(5 * returns))], REWARDS, 0.9)
    assert result is not None and result.correlation is not None
    assert result.rank_correlation == pytest.approx(1.0) and result.correlation < 0.9


def test_an_optimistic_critic_has_a_bias() -> None:
    rewards = [-1.0, -1.0, 0.0]
    returns = discounted_returns(np.array(rewards), 0.9)
    result = calibrate([make_rollout(rewards, True, q=returns + 2)], REWARDS, 0.9)
    assert result is not None and result.bias == pytest.approx(2.0) and result.rmse == pytest.approx(2.0)


def test_returns_cut_by_a_time_limit_are_not_held_against_the_critic() -> None:
    success = make_rollout([-1.0, 0.0], True, q=[-1.0, 0.0])
    cut = make_rollout([-1.0] * 4, False, q=[-50.0] * 4)
    result = calibrate([success, cut], REWARDS, 1.0)
    assert result is not None and result.chunks == 2 and result.rmse == 0.0
    assert result.success_auc == 1.0
    assert calibrate([cut], REWARDS, 1.0) is None
    assert calibrate([make_rollout([0.0], True)], REWARDS, 1.0) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=12))
def test_success_auc_counts_pairs(episodes: list[tuple[bool, int]]) -> None:
    rollouts = [make_rollout([0.0], success, q=[value]) for success, value in episodes]
    result = calibrate(rollouts, REWARDS, 0.9)
    good = [value for success, value in episodes if success]
    bad = [value for success, value in episodes if not success]
    if not good:
        assert result is None
        return
    assert result is not None
    if not bad:
        assert result.success_auc is None
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in good for b in bad)
    assert result.success_auc == pytest.approx(wins / len(good) / len(bad))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RewardConfig(), [1.0, 2.0, 4.0]),
        (RewardConfig(source="success_column"), [0.0, 0.0, 1.0]),
        (RewardConfig(source="success_column", kind="minus_one_zero"), [-1.0, -1.0, 0.0]),
        (RewardConfig(scale=0.5, bias=-1.0), [-0.5, 0.0, 1.0]),
    ],
)
def test_rewards_are_those_of_training(config: RewardConfig, expected: list[float]) -> None:
    rollouts = [make_rollout([1.0, 2.0, 4.0], True), make_rollout([1.0], False)]
    found = training_rewards(rollouts, config)
    np.testing.assert_allclose(found[0], expected)
    assert len(found) == 2 and len(found[1]) == 1


def test_a_failure_that_ends_an_episode_has_the_reward_of_training() -> None:
    failed, cut = (dataclasses.replace(make_rollout([-1.0, -1.0], False), terminated=ended) for ended in (True, False))
    found = training_rewards([failed, cut], RewardConfig(failure_reward=-7.0))
    assert [rewards.tolist() for rewards in found] == [[-1.0, -7.0], [-1.0, -1.0]]


def test_best_of_n_effect() -> None:
    effect = best_of_n_effect([make_rollout([0.0] * 3, True, q=[1.0, 2.0, 3.0])])
    assert effect is not None
    assert (effect.value_gain, effect.value_spread, effect.action_spread) == (1.0, 1.0, 1.0)
