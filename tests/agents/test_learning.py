"""Problems whose answer is known."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import choose, make_config, quick_jit
from flax import nnx

from acrlpd.agents import Call, train_steps
from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.dsrl_sac import DSRLSAC
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.batch import Batch, StackedBatches
from acrlpd.choice import kind_name
from acrlpd.config import LossWeights, QChunkingConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.observation import Observation

GOAL, DISCOUNT = 4, 0.8


def observation(state: np.ndarray) -> Observation:
    return Observation(images={}, image_masks={}, state=np.asarray(state, np.float32))


def make_transitions(states, next_states, actions, rewards, terminals) -> Batch:
    """Windows that run to their end, or to a terminal inside."""
    b = len(rewards)
    ended = np.maximum.accumulate(terminals, axis=1)
    valid = np.concatenate([np.ones((b, 1)), 1 - ended[:, :-1]], axis=1)
    f32 = lambda x: np.asarray(x, np.float32)  # noqa: E731
    return Batch(
        observations=observation(states),
        next_observations=observation(next_states),
        actions=f32(actions),
        valid=f32(valid),
        rewards=f32(rewards * valid),
        masks=f32(1 - ended),
        terminals=f32(terminals),
        next_terminal=f32(ended[:, -1]),
        sequence_mask=np.ones(b, np.float32),
        leads_to_success=np.ones(b, np.float32),
        importance=np.ones(b, np.float32),
        task_id=np.zeros(b, np.int32),
        episode_id=np.zeros(b, np.int32),
        step_id=np.zeros(b, np.int32),
    )


def learn(config, data: Batch, *, updates: int, batch_size: int, policy_params=None):
    """Uniformly drawn batches, all updates in one call."""
    create = quick_jit(lambda key, params: create_agent(config, key, policy_params=params))
    agent = create(jax.random.key(0), policy_params)
    rows = np.random.default_rng(0).integers(0, len(data.actions), (updates, batch_size))
    # These programs run long, so a little optimisation pays; all of it would take longer than it saves.
    optimized = jax.jit(train_steps, compiler_options={"xla_backend_optimization_level": 1})
    feed = StackedBatches(jax.tree.map(lambda x: jnp.asarray(x)[rows], data), updates)
    bc_weights = jnp.full(updates, config.acrlpd.loss_weights.bc_weight)
    [agent], metrics = optimized([agent], [Call(feed, bc_weights, jax.random.key(1))], updates)
    return agent, metrics.rows(updates)[-1]


def walk_chain(state: int, chunk: tuple[float, ...]) -> tuple[int, list[float], list[float]]:
    """A corridor of states 0 to 4: a step to the right or the left by the action's sign; the goal pays 1."""
    rewards, terminals = [], []
    for action in chunk:
        at_goal = state == GOAL
        state = state if at_goal else min(max(state + (1 if action > 0 else -1), 0), GOAL)
        reached = state == GOAL and not at_goal
        rewards.append(float(reached))
        terminals.append(float(reached))
    return state, rewards, terminals


def optimal_chunk_values(horizon: int) -> dict[tuple[int, tuple[int, ...]], float]:
    """Value iteration over chunks."""
    chunks = list(itertools.product((-1, 1), repeat=horizon))
    values = np.zeros(GOAL + 1)
    for _ in range(50):
        q = {}
        for state, chunk in itertools.product(range(GOAL), chunks):
            end, rewards, terminals = walk_chain(state, chunk)
            bootstrap = 0.0 if any(terminals) else DISCOUNT**horizon * values[end]
            q[state, chunk] = sum(DISCOUNT**i * r for i, r in enumerate(rewards)) + bootstrap
        values[:GOAL] = [max(q[state, chunk] for chunk in chunks) for state in range(GOAL)]
    return q


@pytest.mark.parametrize("backup", [BestOfN(), ImplicitValue(hidden_dims=(64, 64))], ids=kind_name)
def test_critic_converges_to_the_optimal_chunk_values(backup):
    """A quarter of the random chunks are the best ones, so the quantile 0.9 of the data is the optimal value, too."""
    horizon, rng = 2, np.random.default_rng(0)
    states = rng.integers(0, GOAL, 4096)
    actions = rng.uniform(-1, 1, (4096, horizon, 1))  # the behaviour knows nothing
    ends, rewards, terminals = zip(*(walk_chain(s, a[:, 0]) for s, a in zip(states, actions, strict=True)), strict=True)
    one_hot = np.eye(GOAL + 1)
    data = make_transitions(
        one_hot[states], one_hot[np.asarray(ends)], actions, np.asarray(rewards), np.asarray(terminals)
    )
    config = make_config(
        model=StateFlowPolicyConfig(state_dim=GOAL + 1, action_dim=1, action_horizon=horizon, hidden_dims=(32,)),
        qchunking=QChunkingConfig(horizon_length=horizon, action_dim=1),
        critic={"num_critics": 2, "hidden_dims": (64, 64), "q_aggregation": "mean"},
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        backup=backup,
        learnable_temperature=False,
        num_action_samples=16,
        sampling_steps=2,
        discount=DISCOUNT,
        target_update_tau=0.02,
        learning_rate=2e-3,
    )
    agent, info = learn(config, data, updates=1200, batch_size=128)

    expected = optimal_chunk_values(horizon)
    assert expected[3, (1, 1)] == 1.0 and abs(expected[0, (1, 1)] - DISCOUNT**3) < 1e-12
    # In the middle of each quadrant; the value jumps at 0, where a network can only be steep.
    keys = list(expected)
    q = quick_jit(lambda agent, *seen: agent.critics.online_ensemble(None, *seen))(
        agent,
        observation(one_hot[[state for state, _ in keys]]),
        0.6 * np.asarray([chunk for _, chunk in keys], np.float32)[:, None],
    )
    np.testing.assert_allclose(np.mean(q, axis=-1)[:, 0], list(expected.values()), atol=0.06)
    assert float(info["skipped_updates"]) == 0


def test_best_of_n_finds_the_better_mode_and_cloning_does_not():
    """Four of five demonstrations do the worse thing; cloning repeats them in that proportion.

    The state is not zero: between the modes, at an input of zeros, LayerNorm would make any value of nearly nothing.
    """
    rng = np.random.default_rng(0)
    better = rng.random(4096) < 0.2
    actions = np.where(better, 1.0, -1.0) + 0.1 * rng.normal(size=4096)
    rewards = np.where(actions > 0, 1.0, 0.3)[:, None]
    state = np.ones((4096, 1))
    data = make_transitions(state, state, actions[:, None, None], rewards, np.ones((4096, 1)))
    config = make_config(
        model=StateFlowPolicyConfig(state_dim=1, action_dim=1, action_horizon=1, hidden_dims=(64, 64)),
        qchunking=QChunkingConfig(horizon_length=1, action_dim=1),
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=4,
        sampling_steps=5,
        ema_decay=0.98,
        learning_rate=2e-3,
    )
    agent, _ = learn(config, data, updates=800, batch_size=128)

    observations = observation(np.ones((500, 1)))

    @functools.partial(quick_jit, static_argnums=1)
    def sample(agent, n):
        return choose(agent, jax.random.key(2), observations, num_samples=n).actions

    cloned, chosen = (np.asarray(sample(agent, n))[:, 0, 0] for n in (1, 32))
    assert 0.1 < np.mean(cloned > 0) < 0.35
    assert np.mean(cloned < -0.5) > 0.5  # it is the data's other mode, not something in between
    assert np.mean(chosen > 0.5) > 0.95


def bandit(reward_fn, chunk_shape: tuple[int, int], reach: float = 1.0) -> Batch:
    """One state, uniform chunks, and one reward for each chunk, after which the task is over."""
    actions = np.random.default_rng(0).uniform(-reach, reach, (4096, *chunk_shape))
    rewards, terminals = np.zeros((2, 4096, chunk_shape[0]))
    rewards[:, -1], terminals[:, -1] = reward_fn(actions), 1
    state = np.zeros((4096, 1))
    return make_transitions(state, state, actions, rewards, terminals)


def bandit_config(model, **changes):
    return make_config(
        model=model,
        qchunking=QChunkingConfig(horizon_length=model.action_horizon, action_dim=1),
        critic={"num_critics": 2, "hidden_dims": (64, 64), "q_aggregation": "mean"},
        learnable_temperature=False,
        ema_decay=None,
        discount=1.0,
        learning_rate=3e-3,
        **{"num_action_samples": 1, **changes},
    )


def act(agent) -> np.ndarray:
    """Chunks [500, T] of the agent in the only state."""
    observations = observation(np.zeros((500, 1)))
    return np.asarray(quick_jit(lambda agent: choose(agent, jax.random.key(2), observations).actions)(agent))[..., 0]


def test_sac_finds_the_best_chunk_and_keeps_its_entropy():
    """The best chunk is (0.5, -0.5). Around it the policy stays as random as the target entropy asks."""
    data = bandit(lambda chunks: -5 * np.sum(np.square(chunks[..., 0] - [0.5, -0.5]), axis=1), (2, 1))
    config = bandit_config(
        GaussianPolicyConfig(state_dim=1, action_dim=1, action_horizon=2, hidden_dims=(32, 32)),
        improvement="sac",
        loss_weights=LossWeights(actor_weight=1.0, bc_weight=0.0),
        initial_temperature=1.0,
        target_entropy_multiplier=0.5,
    )
    agent, info = learn(config, data, updates=1000, batch_size=64)
    chunks = act(agent)
    np.testing.assert_allclose(chunks.mean(axis=0), [0.5, -0.5], atol=0.1)
    assert np.all(chunks.std(axis=0) > 0.02)
    assert abs(float(info["entropy_estimate"]) - -0.5) < 0.15
    assert float(info["alpha_value"]) < 0.9


def test_distillation_finds_the_best_action_and_the_flow_stays_with_the_data():
    """The data has all actions alike, of which 0.6 is best; the weight of the distance to the flow is small."""
    config = bandit_config(
        StateFlowPolicyConfig(state_dim=1, action_dim=1, action_horizon=1, hidden_dims=(64, 64)),
        improvement=Distillation(distillation_weight=0.01, hidden_dims=(32, 32)),
        loss_weights=LossWeights(actor_weight=1.0, bc_weight=1.0),
        action_bounds=(-1.0, 1.0),
        sampling_steps=5,
    )
    data = bandit(lambda chunks: -np.square(chunks[:, 0, 0] - 0.6), (1, 1))
    agent, _ = learn(config, data, updates=500, batch_size=64)
    assert np.mean(np.abs(act(agent) - 0.6) < 0.15) > 0.95
    # An improvement without weight has not learned, so the flow acts.
    unimproved = dataclasses.replace(config.acrlpd, loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0))
    flow = act(agent.replace(algorithm=dataclasses.replace(agent.algorithm, acrlpd=unimproved)))
    assert abs(flow.mean()) < 0.2 and flow.std() > 0.35


def test_expo_finds_actions_that_are_better_than_all_data():
    """The logged actions end at 0.5, and 0.6 is best: edits reach 0.6, the flow policy does not."""
    config = bandit_config(
        StateFlowPolicyConfig(state_dim=1, action_dim=1, action_horizon=1, hidden_dims=(64, 64)),
        improvement=EXPO(edit_scale=0.4, hidden_dims=(32, 32)),
        loss_weights=LossWeights(actor_weight=1.0, bc_weight=1.0),
        num_action_samples=16,
        sampling_steps=5,
    )
    data = bandit(lambda chunks: -5 * np.square(chunks[:, 0, 0] - 0.6), (1, 1), reach=0.5)
    agent, info = learn(config, data, updates=500, batch_size=64)
    observations = observation(np.zeros((500, 1)))
    chosen = quick_jit(lambda agent: choose(agent, jax.random.key(2), observations))(agent)
    candidates, actions = np.asarray(chosen.candidates)[..., 0, 0], np.asarray(chosen.actions)
    flow, edited = (np.abs(candidates[:, first::2] - 0.6).min(axis=1).mean() for first in (0, 1))
    assert edited < 0.5 * flow
    assert np.mean(candidates[:, ::2] > 0.5) < 0.05 and np.mean(actions > 0.5) > 0.4
    assert np.mean(np.asarray(chosen.index) % 2) > 0.9  # edited chunks are chosen
    assert float(info["edit_gain"]) > 0.5 and float(info["edit_wins"]) > 0.9


@functools.cache
def cloned_bandit():
    """The config and the policy of a run that clones actions, which are all alike; of these actions, 0.6 is best."""
    config = bandit_config(
        StateFlowPolicyConfig(state_dim=1, action_dim=1, action_horizon=1, hidden_dims=(64, 64)),
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        sampling_steps=5,
    )
    agent, _ = learn(config, bandit(value_of_bandit, (1, 1)), updates=500, batch_size=64)
    return config, agent


def value_of_bandit(chunks):
    return -5 * np.square(chunks[:, 0, 0] - 0.6)


def played_bandit(agent, size=2000):
    """Chunks that the policy makes of known noise."""
    noise = np.random.default_rng(1).uniform(-1.5, 1.5, (size, 1)).astype(np.float32)
    states = np.zeros((size, 1))

    @quick_jit
    def denoise(agent, noise):
        policy = agent.policy()
        return policy.denoise(policy.encode(observation(states)), noise[:, None, None], num_steps=5)[:, 0]

    chunks = np.asarray(denoise(agent, noise))
    rewards = value_of_bandit(chunks)[:, None]
    return dataclasses.replace(
        make_transitions(states, states, chunks, rewards, np.ones((size, 1))), noise=jnp.asarray(noise)
    )


@pytest.mark.parametrize("improvement", [DSRL(hidden_dims=(32, 32)), DSRLSAC(hidden_dims=(32, 32))], ids=kind_name)
def test_dsrl_finds_the_noise_of_the_best_chunk_and_leaves_the_policy_alone(improvement):
    cloning, cloned = cloned_bandit()
    frozen_losses = dataclasses.replace(cloning.acrlpd, loss_weights=LossWeights(actor_weight=1.0, bc_weight=0.0))
    config = dataclasses.replace(cloning, acrlpd=frozen_losses, improvement=improvement)
    data = played_bandit(cloned) if improvement.judges_noise else bandit(value_of_bandit, (1, 1))
    policy_params = nnx.to_pure_dict(cloned.policy_params)
    agent, _ = learn(config, data, updates=500, batch_size=64, policy_params=policy_params)
    for loaded, learned in zip(*map(jax.tree.leaves, (policy_params, agent.frozen_params)), strict=True):
        np.testing.assert_array_equal(learned, loaded.astype(jnp.bfloat16))
    before, after = (np.abs(act(agent) - 0.6).mean() for agent in (cloned, agent))
    assert after < 0.25 * before
