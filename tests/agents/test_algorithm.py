"""TD targets against a loop over episodes, and the weights of samples."""

import dataclasses
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import make_batch, make_config
from hypothesis import given, settings

from acrlpd.agents.algorithm import Algorithm, JointLoss, Weights
from acrlpd.agents.backups.base import td_target
from acrlpd.agents.improvements.awr import log_awr_weight
from acrlpd.agents.improvements.base import SampleWeights
from acrlpd.agents.networks import TemperatureModule
from acrlpd.agents.td_loss import td_loss
from acrlpd.config import ACRLPDHyperparams, QChunkingConfig


def walk(rewards, terminal, start, horizon, discount, value_of_step):
    """The value of following the logged actions for `horizon` steps, one environment step at a time.

    `terminal` says whether the last step of the episode is a true terminal (or the recording just
    stopped, as at a time limit). Returns the target and the fields of the window.
    """
    length = len(rewards)
    target, factor, alive = 0.0, 1.0, True
    fields = {"rewards": [], "valid": [], "masks": [], "terminals": []}
    for step in range(start, start + horizon):
        inside = step < length
        ends_here = inside and terminal and step == length - 1
        if inside:
            target += factor * rewards[step]
        factor *= discount
        alive = alive and not ends_here
        fields["rewards"].append(rewards[step] if inside else 0.0)
        fields["valid"].append(float(inside))
        fields["masks"].append(float(alive))
        fields["terminals"].append(float(ends_here))
    if alive:
        target += factor * value_of_step(start + horizon)
    return target, fields


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 12),
    horizon=st.integers(1, 6),
    terminal=st.booleans(),
    discount=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
)
def test_targets_equal_a_walk_through_the_episode(seed, length, horizon, terminal, discount):
    """Every start of every episode: inside, just at the end, past it, with and without a terminal."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=length), rng.normal(size=length + horizon + 1)
    expected, windows = zip(
        *(walk(rewards, terminal, t, horizon, discount, values.__getitem__) for t in range(length)), strict=True
    )
    config = make_config()
    batch = make_batch(config, 1)
    fields = {
        name: np.asarray([window[name] for window in windows], np.float32)
        for name in ("rewards", "valid", "masks", "terminals")
    }
    batch = batch.replace(**fields)
    next_q = np.asarray([values[t + horizon] for t in range(length)], np.float32)
    np.testing.assert_allclose(td_target(batch, next_q, discount), expected, rtol=1e-5, atol=1e-5)


def test_discount_powers():
    batch = make_batch(make_config(), 1).replace(
        rewards=jnp.asarray([[1.0, 10.0, 100.0]]), valid=jnp.ones((1, 4)), masks=jnp.ones((1, 3))
    )
    assert float(td_target(batch, jnp.asarray([1000.0]), 0.5)[0]) == 1 + 5 + 25 + 125
    stopped = batch.replace(masks=jnp.asarray([[1.0, 1.0, 0.0]]))
    assert float(td_target(stopped, jnp.asarray([1000.0]), 0.5)[0]) == 1 + 5 + 25


def test_td_loss_is_squared_or_huber():
    q, target = jnp.asarray([[1.0, 4.0], [0.0, 0.5]]), jnp.asarray([1.0, 0.0])
    mse = td_loss(q, target, ACRLPDHyperparams(critic_loss="mse"))
    np.testing.assert_allclose(mse, [9 / 2, 0.25 / 2])
    huber = td_loss(q, target, ACRLPDHyperparams(critic_loss="huber", huber_delta=2.0))
    np.testing.assert_allclose(huber, [(2.0 * (3.0 - 1.0)) / 2, (0.5 * 0.25) / 2])


def test_critics_see_only_the_first_steps_and_the_real_dims():
    actions = np.arange(2 * 5 * 4).reshape(1, 2, 5, 4).astype(np.float32)
    chunking = QChunkingConfig(horizon_length=3, action_dim=2)
    chunks = Algorithm(ACRLPDHyperparams(), chunking).critic_chunks(jnp.asarray(actions))
    assert chunks.shape == (1, 2, 6)
    np.testing.assert_array_equal(chunks[0, 1], actions[0, 1, :3, :2].reshape(-1))
    n_step = dataclasses.replace(chunking, critic_action_horizon=1)
    chunks = Algorithm(ACRLPDHyperparams(), n_step).critic_chunks(jnp.asarray(actions))
    np.testing.assert_array_equal(chunks[0, 1], actions[0, 1, 0, :2])


def test_awr_weights_are_clipped_exponentials():
    advantage = jnp.asarray([-2.0, 0.0, 1.0, 50.0, 1e6])
    weights = jnp.exp(log_awr_weight(advantage, jnp.asarray(0.5), clip=20.0))
    np.testing.assert_allclose(weights, [math.exp(-4), 1.0, math.exp(2), 20.0, 20.0], rtol=1e-5)


def test_weights_survive_extreme_advantages():
    """All weights far below the smallest float: what counts is their ratio, and it is still there."""
    config = make_config()
    batch = make_batch(config, 3, all_valid=True)
    log_weight, size = jnp.asarray([-500.0, -501.0, -900.0]), batch.valid.sum(axis=1)
    joint = JointLoss(None, None, trains_policy=True)
    weights = Weights(improvement=SampleWeights(log_weight=log_weight, size=size, kept={}))
    largest, total = joint.normalize((batch, None), weights).improvement
    share = jnp.exp(log_weight - largest) * size / total
    np.testing.assert_allclose(share, [1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1)), 0.0], rtol=1e-5)


@pytest.mark.parametrize(("entropy", "direction"), [(5.0, -1), (-5.0, 1)])
def test_temperature_falls_when_the_policy_is_too_diverse(entropy, direction):
    temperature = TemperatureModule(0.7)
    assert float(temperature()) == pytest.approx(0.7)

    def loss(log_alpha):
        module = TemperatureModule(0.7)
        module.log_alpha[...] = log_alpha
        return module.alpha_loss(jnp.asarray(entropy), target_entropy=-1.0)

    gradient = jax.grad(loss)(jnp.asarray(math.log(0.7)))
    assert float(gradient) == pytest.approx(0.7 * (entropy + 1.0), rel=1e-5)
    assert math.copysign(1, -float(gradient)) == direction
