"""QC and QC-FQL against numbers that the Q-chunking paper's code computed from the same weights, data and noise."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import quick_jit
from q_chunking_goldens import STATE_DIM, golden_norms, with_golden_weights

from acrlpd.agents import Agent
from acrlpd.agents.accumulation import compute_gradients
from acrlpd.agents.algorithm import JointLoss
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.networks import Draws, Params
from acrlpd.batch import Batch
from acrlpd.config import ACRLPDHyperparams, LossWeights, QChunkingConfig, RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.config.data import RewardConfig
from acrlpd.data.pipeline.batches import make_windows
from acrlpd.data.pipeline.rewards import compute_rewards
from acrlpd.data.sources.source import ColumnTable
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import acting_model, choose_actions

GOLDENS = Path(__file__).parents[1] / "goldens"
H, A, STEPS, HIDDEN = 5, 5, 60, (64,) * 4
KEY = jax.random.key(0)
near = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-5)
Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=["qc_best_of_n", "qc_fql"])
def golden(request: pytest.FixtureRequest) -> Golden:
    with np.load(GOLDENS / f"{request.param}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def agent(golden: Golden) -> Agent:
    """Weights of the losses turn our means over what a loss may learn from into means over all windows and steps."""
    valid = golden["window_valid"]
    weights = LossWeights(critic_weight=valid[:, -1].mean(), actor_weight=0.0, bc_weight=valid.mean())
    config = RLTrainConfig(
        name="golden",
        model=StateFlowPolicyConfig(state_dim=STATE_DIM, action_dim=A, action_horizon=H, hidden_dims=HIDDEN),
        critic=MLPCritics(num_critics=2, hidden_dims=HIDDEN, q_aggregation="mean"),
        acrlpd=ACRLPDHyperparams(
            loss_weights=weights,
            num_action_samples=noises(golden, "next_candidate_noise").shape[1],
            discount=float(golden["discount"]),
            action_bounds=(-1.0, 1.0),
            learnable_temperature=False,
            ema_decay=None,
        ),
        qchunking=QChunkingConfig(horizon_length=H, action_dim=A),
    )
    if "alpha" in golden:
        hyperparams = dataclasses.replace(config.acrlpd, loss_weights=dataclasses.replace(weights, actor_weight=1.0))
        improvement = Distillation(distillation_weight=float(golden["alpha"]), hidden_dims=HIDDEN)
        config = dataclasses.replace(config, acrlpd=hyperparams, improvement=improvement)
    return with_golden_weights(quick_jit(functools.partial(create_agent, config))(KEY), golden)


@pytest.fixture(scope="module")
def windows(golden: Golden) -> Batch:
    """The golden's windows, made from its rows by the data layer."""
    episodes = len(golden["rewards"]) // STEPS
    names = ("observations", "next_observations", "actions", "rewards", "masks")
    rows = {name: golden[name].reshape(episodes, STEPS, *golden[name].shape[1:]) for name in names}
    # The last state of an episode is known as the next observation of its last step. That row has no action and no
    # reward, so the last ones are repeated.
    states = np.concatenate([rows["observations"], rows["next_observations"][:, -1:]], axis=1).reshape(-1, STATE_DIM)
    actions, rewards, masks = (np.concatenate([rows[name], rows[name][:, -1:]], axis=1) for name in names[2:])
    columns = {"next.reward": rewards.ravel(), "next.success": masks.ravel() == 0}
    offsets = np.arange(episodes + 1) * (STEPS + 1)
    table = ColumnTable(columns, offsets, (None,), np.zeros(offsets[-1], np.int32))
    step_rewards = compute_rewards(table, tuple(range(episodes)), RewardConfig(success_ends_episode=False), None)
    episode, step = np.divmod(golden["starts"], STEPS)
    first = offsets[episode] + step
    made = make_windows(first, offsets[episode + 1] - 1, step_rewards, H, H)
    return Batch(
        observations=observe(states[first]),
        next_observations=observe(states[made.next_rows]),
        actions=actions.reshape(-1, A)[made.action_rows],
        **made.fields,
        importance=np.ones(len(step), np.float32),
        task_id=np.zeros(len(step), np.int32),
        episode_id=episode.astype(np.int32),
        step_id=step.astype(np.int32),
    )


@pytest.fixture(scope="module")
def inputs(golden: Golden, windows: Batch) -> tuple[Batch, Draws]:
    """Past the end of an episode the last action repeats here; there the actions of the next episode follow.

    They do not count, but the policy sees them. Here an action in the row of the last state counts.
    """
    actions = golden["actions"][golden["starts"][:, None] + np.arange(H)]
    batch = windows.replace(actions=actions, valid=golden["window_valid"].astype(np.float32))
    noise, b = noises(golden, "bc_noise_x0")[:, 0], len(golden["starts"])
    draws = Draws(
        flow_noise=noise,
        flow_time=1 - jnp.asarray(golden["bc_time"])[:, 0],
        actor_noise=noises(golden, "distill_noise")[:, 0] if "alpha" in golden else noise,
        actor_time=jnp.zeros(b),
        next_noise=noises(golden, "next_candidate_noise"),
        candidate_noise=jnp.zeros((b, 1, H, A)),
        dropout_keys=jax.random.split(KEY, b),
        label_noise=jnp.zeros(b),
    )
    return jax.tree.map(jnp.asarray, batch), draws


@pytest.fixture(scope="module")
def result(agent: Agent, inputs: tuple[Batch, Draws]) -> Any:
    learns = jax.tree.leaves(agent.improvement.params)
    params = Params(agent.policy_params, agent.critics.online, improvement=agent.improvement.params if learns else None)

    @quick_jit
    def compute(params: Params, inputs: tuple[Batch, Draws]) -> Any:
        return compute_gradients(JointLoss(agent, KEY, trains_policy=True), params, inputs, 1)

    return compute(params, inputs)


def test_windows(golden: Golden, windows: Batch) -> None:
    """Successes in the middle of play: the discounted rewards, the masks and what counts."""
    counts = np.asarray(windows.sequence_mask) > 0
    np.testing.assert_array_equal(windows.sequence_mask, golden["window_valid"][:, -1])
    has_outcome = golden["starts"][:, None] % STEPS + np.arange(H) < STEPS
    np.testing.assert_array_equal(windows.valid * has_outcome, golden["window_valid"])
    returns = np.sum(np.asarray(windows.rewards) * golden["discount"] ** np.arange(H), axis=1)
    near(returns[counts], golden["window_rewards"][counts])
    np.testing.assert_array_equal(np.asarray(windows.masks)[counts, -1], golden["window_masks"][counts])
    assert 0 < golden["window_masks"][counts].mean() < 1


def test_targets_and_losses(golden: Golden, result: Any) -> None:
    _, (record, _, _), targets, _ = result
    valid = golden["window_valid"]
    counts = valid[:, -1] == 1  # where a window leaves its episode, neither code looks at the target
    near(targets.value[counts], golden["td_target"][counts])
    near(record.q.T, golden["q_per_critic"])
    near(np.mean(np.asarray(record.td_loss) * valid[:, -1]), golden["critic_loss"])
    cloning = float(jnp.sum(record.cloning)) * valid.mean()
    near(cloning, golden["bc_flow_loss"])
    improvement = 0.0 if record.improvement is None else float(jnp.sum(record.improvement))
    near(cloning + improvement, golden["actor_loss"])


def test_gradients(golden: Golden, result: Any) -> None:
    """The norm of each array's gradient; a network that does not learn has none."""
    prefix = "grad_norm/"
    expected = {name.removeprefix(prefix): float(x) for name, x in golden.items() if name.startswith(prefix)}
    found = golden_norms(result[3])
    assert found.keys() == {name for name, value in expected.items() if value}
    for name, value in found.items():
        near(value, expected[name], err_msg=name)


def test_chunks(golden: Golden, agent: Agent, inputs: tuple[Batch, Draws]) -> None:
    """Of targets and of acting: the best of N candidates, or the one of the one-step policy, within the bounds."""
    batch = inputs[0]

    def choose(observation: Observation, noise: jax.Array) -> jax.Array:
        b, n = noise.shape[:2]
        model = acting_model(agent, average=False)
        return choose_actions(model, observation, noise, jnp.full(b, n), num_steps=10).actions.reshape(b, -1)

    acted = choose(batch.observations, noises(golden, "act_noise"))
    near(acted, golden["act_actions"])
    counts = golden["window_valid"][:, -1] == 1
    near(choose(batch.next_observations, inputs[1].next_noise)[counts], golden["next_actions"][counts])
    assert np.abs(acted).max() == 1, "some candidates must leave the bounds"


def test_distillation(golden: Golden, agent: Agent, inputs: tuple[Batch, Draws]) -> None:
    if "alpha" not in golden:
        assert agent.networks().improvement is None
        return
    batch, draws = inputs
    networks, noise = agent.networks(), draws.actor_noise[:, None]
    context = networks.encode(batch.observations)
    flow = agent.algorithm.clip(networks.policy.denoise(context, noise, num_steps=10))
    chunk = networks.improvement(context, batch.observations, noise)
    near(flow.reshape(len(noise), -1), golden["distill_flow_actions"])
    near(chunk.reshape(len(noise), -1), golden["distill_actor_actions"])
    near(np.mean(np.square(flow - chunk)), golden["distill_loss"])


def observe(states: np.ndarray) -> Observation:
    return Observation(images={}, image_masks={}, state=states)


def noises(golden: Golden, name: str) -> jax.Array:
    """Noise [b, N, H, A]."""
    flat = golden[name]
    return jnp.asarray(flat).reshape(len(flat), -1, H, A)
