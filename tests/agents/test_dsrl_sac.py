"""DSRL by SAC: targets and losses over noise by hand, what an update leaves out, and the noise of what is played."""

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
from acrlpd.agents.improvements.dsrl_sac import DSRLSAC
from acrlpd.config import LossWeights
from acrlpd.config.plan.flops import count_flops
from acrlpd.models.policy import DENOISE

KEY = jax.random.key(3)
CONFIG = make_config(  # H = 3, noise of one row of 3 dims
    improvement=DSRLSAC(noise_bound=1.25, hidden_dims=(16,)),
    loss_weights=LossWeights(actor_weight=0.7, bc_weight=0.0),
    num_action_samples=1,
    learnable_temperature=False,
    target_entropy_multiplier=0.25,
)


@pytest.fixture(scope="module")
def agent():
    return random_agent(CONFIG)


@pytest.fixture(scope="module")
def batch():
    noise = jax.random.uniform(KEY, (8, 3), minval=-1.25, maxval=1.25)
    return dataclasses.replace(make_batch(CONFIG, 8), noise=noise)


def test_the_losses_are_those_of_sac_over_noise(agent, batch):
    @quick_jit
    def by_hand(agent):
        prepared, draws, _ = prepare(agent, batch, jax.random.fold_in(KEY, 0))
        networks, seen, then = agent.networks(), prepared.observations, prepared.next_observations
        own, online, target = networks.improvement, networks.critics.online_ensemble, networks.critics.target_ensemble
        next_noise, _ = own.choose_noise(networks.encode(then), then, draws.next_noise)
        chosen, log_prob = own.choose_noise(networks.encode(seen), seen, draws.actor_noise[:, None])
        return (
            jnp.min(target(None, then, next_noise[:, :, 0])[:, 0], axis=-1),
            online(None, seen, batch.noise[:, None])[:, 0],
            jnp.min(online(None, seen, chosen[:, :, 0])[:, 0], axis=-1),
            log_prob[:, 0],
        )

    next_value, q, value, log_prob = map(np.asarray, by_hand(agent))
    masks, counts = np.asarray(batch.masks)[:, -1], np.asarray(batch.sequence_mask)
    y = np.asarray(batch.rewards) @ 0.99 ** np.arange(3) + 0.99**3 * masks * next_value
    td = np.mean(np.square(q - y[:, None]), axis=1)
    alpha = float(np.exp(agent.improvement.params["temperature"]["log_alpha"].get_value()))
    actor = alpha * log_prob - value + alpha * (-log_prob - -0.25 * 3)
    _, info = quick_jit(lambda agent: compute_part(agent, "joint", batch, KEY))(agent)
    np.testing.assert_allclose(info["critic_loss"], np.sum(td * counts) / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(info["actor_loss"], np.mean(actor), rtol=1e-5)
    np.testing.assert_allclose(info["entropy_estimate"], -np.mean(log_prob), rtol=1e-5)
    assert 0 < float(info["noise_size"]) < 1.25


def test_the_actor_teaches_no_critic(agent, batch):
    def actor_loss(parts):
        return compute_part(with_parts(agent, parts), "actor", batch, KEY)[0]

    grads = quick_jit(jax.grad(actor_loss))(learned_parts(agent))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads.pop("improvement")))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(grads))


def test_an_update_denoises_nothing(agent, batch):
    counts = count_flops(lambda agent, batch: agent.train_step(batch, KEY), agent, batch)
    assert sum(counts.values()) > 0
    assert not [scopes for scopes in counts if DENOISE in scopes]


def test_the_noise_that_is_told_makes_the_actions_that_are_played(agent, batch):
    chosen = quick_jit(choose)(agent, KEY, batch.observations)

    @quick_jit
    def made_of(agent, noise):
        networks = agent.networks()
        context = networks.encode(batch.observations)
        everywhere = jnp.broadcast_to(noise[:, None, None], (8, 1, 4, 3))
        value = networks.critics.online_ensemble(None, batch.observations, noise[:, None])
        return networks.policy.denoise(context, everywhere, num_steps=2)[:, 0], jnp.min(value, axis=-1)

    actions, values = made_of(agent, chosen.noise)
    np.testing.assert_allclose(chosen.actions, actions, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(chosen.q_values, values, rtol=1e-5, atol=1e-6)
