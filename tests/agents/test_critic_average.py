"""The moving average of the critics: it chooses, it learns nothing, and it changes nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    assert_trees_close,
    assert_trees_identical,
    choose,
    make_batch,
    make_config,
    quick_jit,
    random_agent,
)

from acrlpd.agents import Agent

KEY = jax.random.key(3)
DECAY = 0.75


@pytest.fixture(scope="module")
def updated():
    """An agent without and an agent with an average, after the same two updates."""
    config, agents = make_config(), []
    for decay in (None, DECAY):
        agent = random_agent(config)
        agent = agent.replace(  # random numbers are no state of an optimizer
            policy_opt_state=agent.policy_optimizer.tx.init(agent.policy_params),
            critic_opt_state=agent.critic_optimizer.tx.init(agent.critics.online),
            temperature_opt_state=agent.temperature_optimizer.tx.init(agent.temperature_params),
        )
        if decay is not None:
            hyperparams = dataclasses.replace(config.acrlpd, critic_ema_decay=decay)
            agent = agent.replace(
                critics=agent.critics.replace(average=agent.critics.online),
                algorithm=dataclasses.replace(agent.algorithm, acrlpd=hyperparams),
            )
        update = quick_jit(Agent.train_step)
        history = [agent.critics]
        for seed in range(2):
            agent, _ = update(agent, make_batch(config, 8, seed=seed), KEY)
            history.append(agent.critics)
        agents.append((agent, history, update))
    return agents


def test_the_average_follows_the_online_critics_and_nothing_follows_the_average(updated):
    (plain, *_), (averaged, history, _) = updated
    assert plain.critics.average is None
    assert_trees_identical(averaged.critics.replace(average=None), plain.critics)
    assert_trees_identical(averaged.policy_params, plain.policy_params)
    expected = history[0].online
    for critics in history[1:]:
        expected = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, expected, critics.online)
    assert_trees_close(averaged.critics.average, expected, atol=1e-6)


def test_the_average_chooses_among_candidates(updated):
    _, (agent, *_) = updated
    other = jax.tree.map(lambda x: -x, agent.critics.online)
    by_average = agent.replace(critics=agent.critics.replace(average=other))
    by_online = agent.replace(critics=agent.critics.replace(online=other, average=None))
    observation = make_batch(make_config(), 8).observations
    values = [np.asarray(choose(a, KEY, observation).q_values) for a in (by_average, by_online, agent)]
    np.testing.assert_array_equal(values[0], values[1])
    assert not np.allclose(values[0], values[2])


def test_a_skipped_update_leaves_the_average(updated):
    _, (agent, _, update) = updated
    batch = make_batch(make_config(), 8)
    after, info = update(agent, dataclasses.replace(batch, rewards=jnp.full_like(batch.rewards, jnp.inf)), KEY)
    assert info["update_skipped"] == 1
    assert_trees_identical(after.critics.average, agent.critics.average)
