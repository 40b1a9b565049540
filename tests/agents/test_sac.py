"""Soft actor-critic with the Gaussian policy: the loss by hand, and who learns from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import compute_part, learned_parts, make_batch, make_config, quick_jit, random_agent, with_parts

from acrlpd.agents.algorithm import prepare
from acrlpd.models.families.gaussian import GaussianPolicyConfig

KEY = jax.random.key(3)
MODEL = GaussianPolicyConfig(state_dim=6, action_dim=2, action_horizon=3, hidden_dims=(16,))
CONFIG = make_config(
    model=MODEL, improvement="sac", num_action_samples=1, learnable_temperature=False, target_entropy_multiplier=0.25
)


@pytest.fixture(scope="module")
def agent():
    agent = random_agent(CONFIG)
    return agent.replace(ema_params=jax.tree.map(jnp.copy, agent.policy_params))


def with_bounds(bounds):
    return dataclasses.replace(CONFIG.acrlpd, action_bounds=bounds)


@pytest.fixture(scope="module")
def batch():
    return make_batch(CONFIG, 8)


@pytest.mark.parametrize("bounds", [None, (-0.3, 0.3)], ids=["unbounded", "bounded"])
def test_the_loss_is_that_of_sac(agent, batch, bounds):
    """With bounds, the critics judge what the robot would get."""
    agent = agent.replace(algorithm=dataclasses.replace(agent.algorithm, acrlpd=with_bounds(bounds)))

    def by_hand(agent):
        prepared, draws, _ = prepare(agent, batch, jax.random.fold_in(KEY, 0))
        policy, critics = agent.policy(), agent.critics.online_ensemble
        context = policy.encode(prepared.observations)
        chunk, log_prob = policy.sample_with_log_prob(context, draws.actor_noise[:, None])
        chunk = chunk if bounds is None else jnp.clip(chunk, *bounds)
        q = jnp.min(critics(None, batch.observations, chunk.reshape(8, 1, 6)), axis=-1)
        return log_prob[:, 0], q[:, 0]

    log_prob, q = map(np.asarray, quick_jit(by_hand)(agent))
    loss, info = quick_jit(lambda agent: compute_part(agent, "actor", batch, KEY))(agent)
    alpha = float(np.exp(jax.tree.leaves(agent.improvement.params)[0]))
    excess = -log_prob - 3 * (-0.25 * 2)  # entropy of 3 steps over its target, for 2 dims
    np.testing.assert_allclose(loss, np.mean(alpha * log_prob - q + alpha * excess), rtol=1e-5)
    np.testing.assert_allclose(info["alpha_value"], alpha, rtol=1e-6)
    np.testing.assert_allclose(info["entropy_estimate"], -np.mean(log_prob) / 3, rtol=1e-5)


def test_the_policy_and_the_temperature_of_sac_learn(agent, batch):
    def loss(parts):
        return compute_part(with_parts(agent, parts), "actor", batch, KEY)

    grads, info = quick_jit(jax.grad(loss, has_aux=True))(learned_parts(agent))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads["policy_params"]))
    [slope] = jax.tree.leaves(grads["improvement"])
    excess = 3 * (float(info["entropy_estimate"]) - agent.algorithm.target_entropy)
    np.testing.assert_allclose(slope, float(info["alpha_value"]) * excess, rtol=1e-5)
    for name in ("critics", "temperature_params", "ema_params"):
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(grads[name])), name


def test_cloning_adds_the_log_probability_of_the_logged_chunk(agent, batch):
    """With bc_weight 0, which is RLPD, logged actions at the bounds still give finite gradients."""
    at_the_bounds = dataclasses.replace(batch, actions=jnp.sign(batch.actions))

    def total(params, weight):
        weights = dataclasses.replace(agent.loss_weights, bc_weight=weight)
        return agent.replace(policy_params=params, loss_weights=weights).compute_loss(at_the_bounds, KEY)

    value_and_grad = quick_jit(jax.value_and_grad(total, has_aux=True))
    (with_cloning, info), _ = value_and_grad(agent.policy_params, jnp.asarray(0.01))
    (without, _), grads = value_and_grad(agent.policy_params, jnp.asarray(0.0))
    np.testing.assert_allclose(with_cloning - without, 0.01 * float(info["bc_loss"]), rtol=1e-3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
