"""DSRL: what is a candidate, the loss by hand, and who learns from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import choose, compute_part, make_batch, make_config, quick_call, quick_jit, random_agent
from jax.extend.core import jaxprs_in_params

from acrlpd.agents import train_step
from acrlpd.agents.algorithm import prepare
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.config import LossWeights
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

KEY = jax.random.key(3)
BOUND = 1.25
WIDTH = 29  # of the policy's hidden layers; nothing else has this size
CHANGES = {
    "model": StateFlowPolicyConfig(state_dim=6, action_dim=3, action_horizon=4, hidden_dims=(WIDTH, WIDTH)),
    "loss_weights": LossWeights(actor_weight=0.7, bc_weight=0.0),
    "num_action_samples": 2,
    "learnable_temperature": False,
    "target_entropy_multiplier": 0.25,
}
CONFIGS = {
    rows: make_config(improvement=DSRL(noise_bound=BOUND, noise_rows=rows, hidden_dims=(16,)), **CHANGES)
    for rows in ("one", "all")
}


@functools.cache
def build(rows):
    return random_agent(CONFIGS[rows])


@pytest.fixture(scope="module")
def batch():
    return make_batch(CONFIGS["one"], 8)


@pytest.mark.parametrize("rows", ["one", "all"])
def test_candidates_are_chunks_of_the_noise_that_the_actor_chooses(rows, batch):
    def both(agent):
        networks, noise = agent.networks(), jax.random.normal(KEY, (8, 2, 4, 3))
        context = networks.encode(batch.observations)
        chosen, _ = networks.improvement.choose_noise(context, batch.observations, noise)
        chunks = networks.policy.denoise(context, jnp.broadcast_to(chosen, noise.shape), num_steps=2)
        return chosen, chunks, choose(agent, KEY, batch.observations).candidates

    chosen, chunks, candidates = map(np.asarray, quick_jit(both)(build(rows)))
    assert chosen.shape == (8, 2, 1 if rows == "one" else 4, 3)
    assert np.abs(chosen).max() < BOUND and np.abs(chosen).max() > 0.5
    np.testing.assert_allclose(candidates, chunks, rtol=1e-5, atol=1e-6)


def test_the_loss_is_that_of_dsrl(batch):
    def by_hand(agent):
        prepared, draws, _ = prepare(agent, batch, jax.random.fold_in(KEY, 0))
        networks, seen = agent.networks(), prepared.observations
        own, context = networks.improvement, networks.encode(seen)
        chosen, log_prob = own.choose_noise(context, seen, draws.actor_noise[:, None])
        noise = jnp.concatenate([chosen, jnp.clip(draws.flow_noise[:, None, :1], -BOUND, BOUND)], axis=1)
        chunks = networks.policy.denoise(context, jnp.broadcast_to(noise, (8, 2, 4, 3)), num_steps=2)
        online = networks.critics.online_ensemble
        target = jnp.min(online(context.features, seen, chunks[:, :, :3, :2].reshape(8, 2, 6)), axis=-1)
        members = own.critics(None, seen, noise[:, :, 0])  # [8, 2, members]
        error = members - target[..., None]
        return log_prob[:, 0], jnp.mean(members[:, 0], axis=-1), jnp.mean(jnp.square(error)), target

    log_prob, value, distillation, target = map(np.asarray, quick_jit(by_hand)(build("one")))
    loss, info = quick_jit(lambda agent: compute_part(agent, "actor", batch, KEY))(build("one"))
    alpha = float(np.exp(build("one").improvement.params["temperature"]["log_alpha"].get_value()))
    excess = -log_prob - -0.25 * 3  # entropy of one row over its target, for the 3 dims of the noise
    np.testing.assert_allclose(loss, np.mean(alpha * log_prob - value + alpha * excess) + distillation, rtol=1e-5)
    np.testing.assert_allclose(info["entropy_estimate"], -np.mean(log_prob), rtol=1e-5)
    np.testing.assert_allclose(info["noise_gain"], np.mean(target[:, 0] - target[:, 1]), rtol=1e-4)
    assert 0 < float(info["noise_size"]) < BOUND and float(info["noise_critic_error"]) > 0


def test_the_probability_of_noise_is_that_of_the_box():
    """It is in the units of the noise, and no actor has more entropy than uniform noise in the box."""
    own, batch = build("one").networks().improvement, make_batch(CONFIGS["one"], 2)
    context = build("one").networks().encode(batch.observations)
    noise = jax.random.normal(KEY, (2, 4096, 4, 3))
    chosen, log_prob = own.choose_noise(context, batch.observations, noise)
    unit, density = own.actor.sample(batch.observations.state[:, None], noise[:, :, 0])
    np.testing.assert_allclose(chosen[:, :, 0], BOUND * unit, rtol=1e-6)
    np.testing.assert_allclose(log_prob, np.sum(density, axis=-1) - 3 * np.log(BOUND), rtol=1e-4, atol=1e-4)
    assert np.all(-np.mean(log_prob, axis=1) < 3 * np.log(2 * BOUND))


def test_only_the_improvements_own_networks_and_the_critics_learn(batch):
    agent = build("one")
    assert not jax.tree.leaves(agent.policy_params)  # and so no gradients, no optimizer state and no average
    before = jax.tree.map(np.array, (agent.frozen_params, agent.improvement.params, agent.critics.online))
    after, info = quick_call(train_step, jax.tree.map(jnp.copy, agent), batch, KEY)
    frozen, own, critics = jax.tree.map(
        lambda a, b: bool(np.array_equal(a, b)),
        before,
        (after.frozen_params, after.improvement.params, after.critics.online),
    )
    assert all(jax.tree.leaves(frozen))
    assert not any(jax.tree.leaves(own)) and not any(jax.tree.leaves(critics))
    assert float(info["improvement_grad_norm"]) > 0 and "actor_loss" in info and "bc_loss" not in info


def test_the_backward_pass_of_the_policy_is_not_computed(batch):
    """An update multiplies by the policy's matrices as often as the loss alone does."""

    def products(function):
        def of(jaxpr):
            for equation in jaxpr.eqns:
                inner = list(jaxprs_in_params(equation.params))
                yield from (found for sub in inner for found in of(sub))
                shapes = [v.aval.shape for v in equation.invars if hasattr(v, "aval")]
                if equation.primitive.name == "dot_general" and any(WIDTH in shape for shape in shapes):
                    yield equation

        return len(list(of(jax.make_jaxpr(function)(build("one")).jaxpr)))

    loss, update = (
        products(lambda agent, f=f: f(agent, batch, KEY)) for f in (type(build("one")).compute_loss, train_step)
    )
    assert loss == update > 0
