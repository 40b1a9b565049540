"""What targets bootstrap from: the implicit value by hand, who learns from it, and what it does not compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    QUICK,
    assert_trees_close,
    compute_part,
    learned_parts,
    make_batch,
    make_config,
    quick_call,
    quick_jit,
    random_agent,
    tiny_pi0,
    with_parts,
)

from acrlpd.agents import train_step
from acrlpd.agents.backups.base import Backup
from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.improvements.base import View
from acrlpd.agents.networks import draw
from acrlpd.choice import find_kind, kind_names
from acrlpd.config import apply_config_overrides, get_config, validate_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import count_flops
from acrlpd.models.policy import DENOISE, ENCODE

KEY = jax.random.key(11)
NEXT_CANDIDATES = {"choice_entropy", "best_of_n_gain", "candidate_q_std", "candidate_diversity", "alpha_loss"}


def implicit(loss="quantile", kappa=0.8, **changes):
    backup = ImplicitValue(loss=loss, kappa=kappa, hidden_dims=(16,))
    return make_config(backup=backup, learnable_temperature=False, **changes)


def build(config):
    return random_agent(config)


def test_the_family():
    assert kind_names(Backup) == ("best_of_n", "decoupled", "implicit_value")
    config = apply_config_overrides(get_config("debug"), {"backup": "implicit_value", "backup.kappa": 0.7})
    assert config.backup == ImplicitValue(kappa=0.7)
    assert find_kind(Backup, "best_of_n")() == get_config("debug").backup


@pytest.mark.parametrize("loss", ["quantile", "expectile"])
def test_the_loss_of_the_implicit_value_by_hand(loss):
    config = implicit(loss, critic={"q_aggregation": "mean"})
    agent, batch = quick_jit(lambda key: create_agent(config, key))(KEY), make_batch(config, 12)
    total, info = quick_jit(lambda agent: compute_part(agent, "critic", batch, KEY))(agent)

    @quick_jit
    def values(agent):
        value, chunk = agent.networks().backup, batch.actions[:, :3, :2].reshape(12, 1, 6)
        seen = batch.observations
        return (
            value(None, seen)[:, 0],
            value(None, batch.next_observations)[:, 0],
            agent.critics.online_ensemble(None, seen, chunk)[:, 0],
            jnp.mean(agent.critics.target_ensemble(None, seen, chunk)[:, 0], axis=-1),
        )

    value, next_value, q, target_q = map(np.asarray, values(agent))
    masks, counts = np.asarray(batch.masks)[:, -1], np.asarray(batch.sequence_mask)
    assert 0 < counts.mean() < 1 and 0 < masks.mean() < 1
    y = np.asarray(batch.rewards) @ 0.99 ** np.arange(3) + 0.99**3 * masks * next_value
    td = np.mean(np.square(q - y[:, None]), axis=1)
    error = target_q - value
    own = np.abs(0.8 - (error < 0)) * (np.abs(error) if loss == "quantile" else error**2)
    assert np.any(error < 0) and np.any(error > 0)
    np.testing.assert_allclose(info["critic_loss"], np.sum(td * counts) / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(info["backup_loss"], np.sum(own * counts) / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(total, info["critic_loss"] + info["backup_loss"], rtol=1e-5)
    assert not NEXT_CANDIDATES & set(info)


def test_advantages_compare_with_the_implicit_value_by_hand():
    """The best of the data have advantages above zero, whatever the policy would do."""
    config = implicit(critic={"q_aggregation": "mean"})
    agent, batch = quick_jit(lambda key: create_agent(config, key))(KEY), make_batch(config, 12)

    @quick_jit
    def advantages(agent):
        chunk = batch.actions[:, :3, :2].reshape(12, 1, 6)
        q = jnp.mean(agent.critics.online_ensemble(None, batch.observations, chunk)[:, 0], axis=-1)
        view = View(agent.algorithm, agent.networks(), batch, draw(KEY, batch, config.acrlpd))
        return view.advantage, q - agent.networks().backup(None, batch.observations)[:, 0]

    found, expected = map(np.asarray, advantages(agent))
    assert np.any(expected > 0) and np.any(expected < 0)
    np.testing.assert_allclose(found, expected * np.asarray(batch.sequence_mask), rtol=1e-5, atol=1e-6)
    judged = expected[np.asarray(batch.sequence_mask) > 0]
    info = quick_jit(lambda agent: compute_part(agent, "actor", batch, KEY)[1])(agent)
    np.testing.assert_allclose(info["advantage_mean"], np.mean(judged), rtol=1e-4)
    np.testing.assert_allclose(info["advantage_std"], np.std(judged), rtol=1e-4)


def test_the_value_learns_from_the_target_critics_and_teaches_nobody_directly():
    config = implicit(loss_weights=dataclasses.replace(make_config().acrlpd.loss_weights, actor_weight=0.0))
    agent, batch = build(config), make_batch(config, 8)

    def total(parts):
        return compute_part(with_parts(agent, parts), "critic", batch, KEY)[0]

    grads = quick_jit(jax.grad(total))(learned_parts(agent))
    own = grads.pop("backup")
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(own))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(grads["critics"].online))
    for parts in (grads["critics"].target, grads["policy_params"], grads["temperature_params"]):
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(parts))


def test_without_features_the_next_observation_is_not_encoded():
    """Plain Q-chunking with a pi0: one prefix with gradient is left, and no denoising, also with advantages."""

    def flops(backup, use_features, **changes):
        weights = dataclasses.replace(make_config().acrlpd.loss_weights, **({"actor_weight": 0.0} | changes))
        config = make_config(
            model=tiny_pi0(),
            backup=backup,
            critic={"use_pi0_features": use_features},
            learnable_temperature=False,
            loss_weights=weights,
        )
        agent = jax.eval_shape(lambda key: create_agent(config, key), KEY)
        counts = count_flops(lambda agent, batch: agent.train_step(batch, KEY), agent, make_batch(config, 2))
        of = {part: [n for scopes, n in counts.items() if part in scopes] for part in (ENCODE, DENOISE)}
        without_gradient = [n for scopes, n in counts.items() if ENCODE in scopes and "jvp" not in scopes]
        return sum(without_gradient), sum(of[DENOISE])

    value = ImplicitValue(hidden_dims=(16,))
    encoded, denoised = flops(None, False)
    assert encoded > 0
    encoded_for_features, of_the_loss = flops(value, True)
    assert encoded_for_features > 0 and of_the_loss < denoised
    assert flops(value, False) == flops(value, False, actor_weight=1.0) == (0, of_the_loss)


def test_an_update_trains_the_value_and_micro_batches_change_nothing():
    config = implicit()
    agent, batch = jax.jit(create_agent, static_argnums=0)(config, KEY), make_batch(config, 8)
    before = jax.tree.map(jnp.copy, agent)
    whole, info = quick_call(train_step, agent, batch, KEY)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before.backup.params, whole.backup.params)
    assert all(jax.tree.leaves(changed)) and float(info["backup_grad_norm"]) > 0
    training = dataclasses.replace(config.training, gradient_accumulation_steps=4)
    split = jax.jit(create_agent, static_argnums=0)(dataclasses.replace(config, training=training), KEY)
    after, split_info = quick_call(train_step, split, batch, KEY)
    assert_trees_close(split_info, info, rtol=2e-4, atol=2e-6)
    assert_trees_close(after.backup.opt_state[1][0].mu, whole.backup.opt_state[1][0].mu, rtol=1e-3, atol=1e-6)


def test_updates_with_features_of_a_pi0():
    config = make_config(model=tiny_pi0(), backup=ImplicitValue(hidden_dims=(8,)), learnable_temperature=False)
    agent, batch = build(config), make_batch(config, 2)
    agent = agent.replace(backup=agent.backup.replace(opt_state=agent.critic_optimizer.tx.init(agent.backup.params)))
    step = train_step.lower(agent, batch, KEY, update_policy=False).compile(QUICK)
    _, info = step(agent, batch, KEY)
    assert float(info["update_skipped"]) == 0 and float(info["backup_grad_norm"]) > 0


def test_a_learned_temperature_is_refused():
    config = apply_config_overrides(
        get_config("debug"), {"backup": "implicit_value", "acrlpd.learnable_temperature": True}
    )
    [message] = validate_config(config).errors
    assert "backup implicit_value has no candidates" in message
    assert "set acrlpd.learnable_temperature false" in message
