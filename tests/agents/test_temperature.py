"""Temperatures that settle: measures that rise with alpha, bisection, and a learned alpha with a fixed point."""

import math

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from acrlpd.agents.improvements.awr import AWR
from acrlpd.agents.improvements.base import SampleWeights
from acrlpd.agents.networks import TemperatureModule
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.optimizers.base import create_optimizer
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.temperature import choice_entropy, effective_share, follow_choice, over_spread, solve_alpha

VALUES = arrays.arrays(np.float32, 8, elements=st.floats(-2, 2, width=32))
ALPHAS = np.geomspace(0.02, 100, 60).astype(np.float32)


@settings(max_examples=50)
@given(VALUES)
def test_both_measures_rise_with_alpha(values):
    share = [float(effective_share(values / alpha)) for alpha in ALPHAS[::6]]
    entropy = np.asarray(choice_entropy(jnp.broadcast_to(values, (60, 8)), jnp.asarray(ALPHAS)))
    assert np.all(np.diff(share) > -1e-5) and np.all(np.diff(entropy) > -1e-5)
    assert 1 / 8 - 1e-5 < share[0] <= share[-1] < 1 + 1e-5 and entropy[-1] < 1 + 1e-5


def test_the_effective_share_by_hand():
    weights = np.asarray([1.0, 2.0, 0.5, 7.0])
    expected = weights.sum() ** 2 / (4 * np.sum(weights**2))
    np.testing.assert_allclose(effective_share(jnp.log(weights)), expected, rtol=1e-6)
    np.testing.assert_allclose(effective_share(jnp.log(weights) + 500), expected, rtol=1e-4)


def test_the_share_is_that_of_the_samples_that_count():
    """Samples of weight 0 are not data of the policy; AWR weighs the others as if it had no others."""
    advantage = jax.random.normal(jax.random.key(5), (40,))
    chosen = jnp.arange(40) < 30
    weights = SampleWeights(log_weight=advantage, size=jnp.ones(40), kept={"advantage": advantage})
    for awr in (AWR(effective_share=0.3), AWR(effective_share=None, temperature=0.7)):
        found = awr.balance(weights.only(chosen)).log_weight
        alone = awr.balance(jax.tree.map(lambda x: x[:30], weights)).log_weight
        np.testing.assert_allclose(found[:30], alone, rtol=1e-4, atol=1e-5)
        assert np.all(found[30:] == -np.inf)
        none = awr.balance(weights.only(jnp.zeros(40, bool))).log_weight
        assert np.all(none == -np.inf) and effective_share(none) == 0


@pytest.mark.parametrize("target", [0.1, 0.3, 0.9])
def test_bisection_finds_the_alpha_of_a_share(target):
    advantage = over_spread(jax.random.normal(jax.random.key(0), (64,)) * 1e4, jnp.ones(64, bool))
    np.testing.assert_allclose(jnp.std(advantage), 1.0, rtol=1e-5)
    alpha = solve_alpha(lambda alpha: effective_share(advantage / alpha), target, ())
    np.testing.assert_allclose(effective_share(advantage / alpha), target, rtol=1e-3)


def test_equal_advantages_weigh_equally():
    advantage = over_spread(jnp.full(8, 3.0), jnp.ones(8, bool))
    alpha = solve_alpha(lambda alpha: effective_share(advantage / alpha), 0.3, ())
    np.testing.assert_allclose(effective_share(advantage / alpha), 1.0, rtol=1e-5)


OPTIMIZER = create_optimizer(AdamW(b2=0.999, weight_decay=0.0), ConstantSchedule(3e-4))


@jax.jit
def learn(log_alpha, state, rng):
    """100,000 updates of a learned temperature alone; each one sees other states, whose values differ in scale."""

    def loss(log_alpha, key):
        scale_key, value_key = jax.random.split(key)
        scale = jnp.exp(0.5 * jax.random.normal(scale_key, (4, 1)))
        values = scale * jax.random.normal(value_key, (4, 8)) - 20.0
        return jnp.mean(follow_choice(log_alpha, values, 0.5))

    def update(index, carry):
        slope = jax.grad(loss)(carry[0], jax.random.fold_in(rng, index))
        return OPTIMIZER.step(slope, carry[1], carry[0], enabled=True)

    return jax.lax.fori_loop(0, 100_000, update, (log_alpha, state))


def test_a_learned_temperature_settles_from_both_sides_however_long_it_learns():
    """The rule before integrated a constant: log alpha moved by 3e-4 at each of the 200,000 updates, 60 in all."""
    start = jnp.log(jnp.asarray([1e-3, 1.0, 1e3]))
    long, state = jax.vmap(learn, (0, 0, None))(start, jax.vmap(OPTIMIZER.tx.init)(start), jax.random.key(1))
    longer, _ = jax.vmap(learn, (0, 0, None))(long, state, jax.random.key(2))
    scale = jnp.exp(0.5 * jax.random.normal(jax.random.key(4), (20_000, 1)))
    values = scale * jax.random.normal(jax.random.key(3), (20_000, 8))
    slope = jax.grad(lambda log_alpha: jnp.mean(follow_choice(log_alpha, values, 0.5)))
    fixed_point = -float(slope(jnp.zeros(())))  # the loss is a square around the fixed point
    np.testing.assert_allclose(long, fixed_point, atol=0.05)
    np.testing.assert_allclose(longer, fixed_point, atol=0.05)
    assert 0.3 < math.exp(fixed_point) < 1.0


def test_a_state_with_one_value_for_all_candidates_says_nothing():
    values = jnp.asarray([[1.0, 1.0, 1.0], [0.0, 0.5, 2.0]])
    losses, slopes = jax.vmap(jax.value_and_grad(lambda x, v: follow_choice(x, v[None], 0.5)[0]), (None, 0))(
        1.0, values
    )
    assert losses[0] == 0 and slopes[0] == 0 and losses[1] > 0 and np.isfinite(slopes[1])
    alpha = jnp.exp(1.0 - slopes[1])
    np.testing.assert_allclose(choice_entropy(values[1:], alpha[None]), 0.5, rtol=1e-3)


def test_ties_do_not_drive_the_temperature_away():
    """Two of four candidates share the highest value, so no alpha makes the choice surer than a coin."""
    values = jnp.asarray([[1.0, 1.0, 0.0, 0.0]])
    slope = jax.grad(lambda x: follow_choice(x, values, 0.2)[0])(0.0)
    np.testing.assert_allclose(-slope, math.log(1e-3), rtol=1e-3)


def test_temperature_must_start_positive():
    with pytest.raises(ValueError, match="initial_temperature"):
        TemperatureModule(0.0)
