"""EXPO: what is a candidate, the loss by hand, and who learns from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    choose,
    compute_part,
    learned_parts,
    make_batch,
    make_config,
    quick_jit,
    random_agent,
    with_parts,
)

from acrlpd.agents.algorithm import prepare
from acrlpd.agents.improvements.expo import EXPO

KEY = jax.random.key(3)
SCALE = 0.3
# Chunks of 4 steps of 3 dims, of which critics and edits see 3 steps of 2 dims.
CONFIG = make_config(
    improvement=EXPO(edit_scale=SCALE, hidden_dims=(16,)),
    critic={"q_aggregation": "min"},
    learnable_temperature=False,
    target_entropy_multiplier=0.25,
)


@pytest.fixture(scope="module")
def agent():
    agent = random_agent(CONFIG)
    return agent.replace(ema_params=jax.tree.map(jnp.copy, agent.policy_params))


@pytest.fixture(scope="module")
def batch():
    return make_batch(CONFIG, 8)


def test_candidates_are_chunks_of_the_policy_and_the_same_chunks_edited(agent, batch):
    def candidates(agent, n):
        return np.asarray(
            quick_jit(lambda agent: choose(agent, KEY, batch.observations, num_samples=n).candidates)(agent)
        )

    unimproved = dataclasses.replace(CONFIG.acrlpd.loss_weights, actor_weight=0.0)
    acrlpd = dataclasses.replace(CONFIG.acrlpd, loss_weights=unimproved)
    plain = agent.replace(algorithm=dataclasses.replace(agent.algorithm, acrlpd=acrlpd))
    found, expected = candidates(agent, 4), candidates(plain, 4)
    np.testing.assert_allclose(found[:, ::2], expected[:, ::2], rtol=1e-5, atol=1e-6)
    edits = found[:, 1::2] - found[:, ::2]
    assert np.abs(edits[..., :3, :2]).min() > 0 and np.abs(edits).max() < SCALE
    assert np.abs(edits[..., 3:, :]).max() == np.abs(edits[..., 2:]).max() == 0
    # The server may be asked for any number of candidates; a single one is the policy's own.
    np.testing.assert_allclose(candidates(agent, 1), candidates(plain, 1), rtol=1e-5, atol=1e-6)


def test_chunks_are_edited_as_the_robot_would_get_them(agent, batch):
    """The edit policy learns from logged chunks, which lie within the bounds of the robot."""
    bounds, observations, noise = (-0.2, 0.2), batch.observations, jax.random.normal(KEY, (8, 4, 4, 3))
    bounded = dataclasses.replace(agent.algorithm, acrlpd=dataclasses.replace(CONFIG.acrlpd, action_bounds=bounds))

    def both(agent):
        networks = agent.networks()
        context = networks.encode(observations)
        candidates = bounded.candidates(networks, context, observations, noise)
        edits, _ = networks.improvement.edit(context, observations, candidates[:, ::2], noise[:, 1::2])
        return candidates[..., :3, :2], edits

    seen, edits = map(np.asarray, quick_jit(both)(agent))
    assert 0 < np.mean(np.isin(seen[:, ::2], np.float32(bounds))) < 1
    np.testing.assert_allclose(seen[:, 1::2], np.clip(seen[:, ::2] + SCALE * edits, *bounds), rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_expo(agent, batch):
    def by_hand(agent):
        prepared, draws, _ = prepare(agent, batch, jax.random.fold_in(KEY, 0))
        networks = agent.networks()
        context, seen = networks.encode(prepared.observations), prepared.observations
        logged, noise = batch.actions[:, None], draws.actor_noise[:, None]
        edits, log_prob = networks.improvement.edit(context, seen, logged, noise)
        chunk = batch.actions[:, :3, :2] + SCALE * edits[:, 0]
        q = networks.critics.online_ensemble(context.features, seen, chunk.reshape(8, 1, 6))
        return log_prob[:, 0], jnp.mean(q, axis=-1)[:, 0], edits

    log_prob, q, edits = map(np.asarray, quick_jit(by_hand)(agent))
    loss, info = quick_jit(lambda agent: compute_part(agent, "actor", batch, KEY))(agent)
    alpha = float(np.exp(agent.improvement.params["temperature"]["log_alpha"].get_value()))
    excess = -log_prob - 3 * (-0.25 * 2)  # entropy of 3 steps over its target, for 2 dims
    np.testing.assert_allclose(loss, np.mean(alpha * log_prob - q + alpha * excess), rtol=1e-5)
    np.testing.assert_allclose(info["entropy_estimate"], -np.mean(log_prob) / 3, rtol=1e-5)
    np.testing.assert_allclose(info["alpha_value"], alpha, rtol=1e-6)
    np.testing.assert_allclose(
        info["edit_norm"], np.mean(SCALE * np.linalg.norm(edits.reshape(8, 6), axis=1)), rtol=1e-5
    )


def test_the_edit_policy_and_its_temperature_learn_alone(agent, batch):
    def loss(parts):
        return compute_part(with_parts(agent, parts), "actor", batch, KEY)[0]

    grads = quick_jit(jax.grad(loss))(learned_parts(agent))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads.pop("improvement")))
    for name, parts in grads.items():
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(parts)), name
