"""DQC: chunk critics, the critics of the first actions and the value, against the equations written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    assert_trees_close,
    choose,
    compute_part,
    learned_parts,
    make_batch,
    make_config,
    quick_jit,
    random_agent,
    with_parts,
)
from flax import nnx

from acrlpd.agents.accumulation import compute_gradients
from acrlpd.agents.algorithm import JointLoss
from acrlpd.agents.backups.decoupled import Decoupled
from acrlpd.agents.networks import Params
from acrlpd.config import LossWeights, QChunkingConfig, apply_config_overrides, get_config, validate_config
from acrlpd.envs.create import create_execution

KEY = jax.random.key(3)
H, C = 3, 2
BACKUP = Decoupled(kappa=0.9, distillation_kappa=0.7, hidden_dims=(16,))


CONFIG = make_config(
    backup=BACKUP,
    qchunking=QChunkingConfig(horizon_length=H, action_dim=2, critic_action_horizon=C),
    critic={"q_aggregation": "mean", "num_critics": 2},
    learnable_temperature=False,
    loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
)


@pytest.fixture(scope="module")
def agent():
    return random_agent(CONFIG)


def by_hand(agent, parts, batch):
    """The loss of DQC from its equations: (of the critics, of chunk critics and value)."""
    stop = jax.lax.stop_gradient
    own = nnx.merge(agent.backup.network, parts["backup"])
    critics = nnx.merge(agent.critics.network, parts["critics"].online)
    target_critics = nnx.merge(agent.critics.network, parts["critics"].target)
    seen, actions = batch.observations, batch.actions
    first = actions[:, :C, :2].reshape(-1, 1, C * 2)
    whole = actions[:, :H, :2].reshape(-1, 1, H * 2)

    def mean(loss):
        return jnp.sum(loss * batch.sequence_mask) / jnp.sum(batch.sequence_mask)

    next_value = stop(own.value(None, batch.next_observations)[:, 0])
    y = jnp.zeros(len(actions))
    for i in range(H):
        y += 0.99**i * batch.rewards[:, i]
    y += 0.99**H * batch.masks[:, -1] * next_value

    q_whole = own.chunk_critics(None, seen, whole)[:, 0]  # [b, 2]
    q_first = critics(None, seen, first)[:, 0]
    taught = stop(jnp.mean(q_whole, axis=1))[:, None] - q_first
    distillation = jnp.where(taught > 0, 0.7, 0.3) * taught**2
    value_error = stop(jnp.mean(target_critics(None, seen, first)[:, 0], axis=1)) - own.value(None, seen)[:, 0]
    quantile = jnp.where(value_error > 0, 0.9, 0.1) * jnp.abs(value_error)
    of_chunks = jnp.mean((q_whole - y[:, None]) ** 2, axis=1)
    return mean(jnp.mean(distillation, axis=1)), mean(of_chunks + quantile)


def test_losses_and_gradients_are_those_of_the_equations(agent):
    batch, parts = make_batch(CONFIG, 12), learned_parts(agent)

    def ours(parts):
        return compute_part(with_parts(agent, parts), "critic", batch, KEY)

    def expected(parts):
        losses = by_hand(agent, parts, batch)
        return sum(losses), losses

    (_, info), grads = quick_jit(jax.value_and_grad(ours, has_aux=True))(parts)
    (_, losses), expected_grads = quick_jit(jax.value_and_grad(expected, has_aux=True))(parts)
    np.testing.assert_allclose((info["critic_loss"], info["backup_loss"]), losses, rtol=1e-5)
    assert_trees_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves((grads["backup"], grads["critics"].online)))


def test_micro_batches_change_nothing(agent):
    params = Params(critic=agent.critics.online, backup=agent.backup.params)

    @functools.partial(quick_jit, static_argnums=1)
    def gradients(agent, num_micro_batches):
        prepared = agent.prepare(make_batch(CONFIG, 8), KEY)
        joint = JointLoss(agent, prepared.subset_rng, trains_policy=False)
        return compute_gradients(joint, params, prepared.inputs, num_micro_batches)[-1]

    assert_trees_close(gradients(agent, 4), gradients(agent, 1), rtol=1e-4, atol=1e-6)


def test_the_critics_of_the_first_actions_choose_and_only_these_are_executed(agent):
    observation = make_batch(CONFIG, 5).observations
    chosen = quick_jit(choose)(agent, KEY, observation)
    first = chosen.candidates[:, :, :C, :2].reshape(5, 4, C * 2)
    values = agent.critics.online_ensemble(None, observation, first).mean(axis=-1)
    np.testing.assert_allclose(chosen.q_values, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(chosen.index, np.argmax(values, axis=1))
    assert create_execution(CONFIG).replan_steps == C


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qchunking.critic_action_horizon": None}, "set qchunking.critic_action_horizon below"),
        ({"qchunking.horizon_length": 11}, "lower the first or raise the second"),
        ({"acrlpd.learnable_temperature": True}, "set acrlpd.learnable_temperature false"),
    ],
)
def test_what_cannot_be_decoupled_is_refused(changes, message):
    given = {"backup": "decoupled", "qchunking.horizon_length": 10, "qchunking.critic_action_horizon": 5}
    config = apply_config_overrides(get_config("debug"), given)
    assert not validate_config(config).errors
    [found] = validate_config(apply_config_overrides(config, changes)).errors
    assert message in found
