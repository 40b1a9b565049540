"""Q-chunking against numbers that the reference implementation of its paper computed from the same weights and data.

There, the flow runs from noise at time 0 to actions at time 1; here it runs from noise at time 1 to actions at time 0.
So velocities change their sign, and time t becomes 1 - t.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.agents.accumulation import compute_gradients
from acrlpd.agents.algorithm import JointLoss, Targets, compute_targets
from acrlpd.agents.critics.mlp import MLPCritics
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

GOLDEN = Path(__file__).parents[1] / "goldens" / "qc_best_of_n.npz"
H, A, N, STEPS = 5, 5, 8, 60
COLUMNS = ("observations", "next_observations", "actions", "rewards", "masks")
CONFIG = RLTrainConfig(
    name="golden",
    batch_size=48,
    model=StateFlowPolicyConfig(state_dim=37, action_dim=A, action_horizon=H, hidden_dims=(64,) * 4),
    critic=MLPCritics(num_critics=2, hidden_dims=(64,) * 4, q_aggregation="mean"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=N,
        action_bounds=(-1.0, 1.0),
        learnable_temperature=False,
        ema_decay=None,
    ),
    qchunking=QChunkingConfig(horizon_length=H, action_dim=A),
)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def agent(golden: dict[str, np.ndarray]) -> Agent:
    fresh = create_agent(CONFIG, jax.random.key(0))
    critics = fresh.critics.replace(
        online=critic_state(golden, "critic", fresh.critics.online),
        target=critic_state(golden, "target_critic", fresh.critics.target),
    )
    return fresh.replace(critics=critics, policy_params=policy_state(golden, fresh.policy_params))


@pytest.fixture(scope="module")
def batch(golden: dict[str, np.ndarray]) -> Batch:
    """The golden's windows, made from its rows by the data layer."""
    episodes = len(golden["rewards"]) // STEPS
    by_episode = {name: golden[name].reshape(episodes, STEPS, *golden[name].shape[1:]) for name in COLUMNS}
    # The last state of an episode is known as the next observation of its last step. The last row's action and reward
    # do not exist.
    states = np.concatenate([by_episode["observations"], by_episode["next_observations"][:, -1:]], axis=1)
    actions, rewards, masks = (add_row(by_episode[name]) for name in ("actions", "rewards", "masks"))
    columns = {"next.reward": rewards.ravel(), "next.success": (masks.ravel() == 0) & (rewards.ravel() == 0)}
    offsets = np.arange(episodes + 1) * (STEPS + 1)
    table = ColumnTable(offsets=offsets, columns=columns, prompts=(None,), prompt_index=np.zeros(offsets[-1], np.int32))
    step_rewards = compute_rewards(table, tuple(range(episodes)), RewardConfig(success_ends_episode=False), None)
    episode, step = np.divmod(golden["starts"], STEPS)
    rows = offsets[episode] + step
    windows = make_windows(rows, offsets[episode + 1] - 1, step_rewards, H, H)
    flat = states.reshape(-1, states.shape[-1])
    return Batch(
        observations=observation(flat[rows]),
        next_observations=observation(flat[windows.next_rows]),
        actions=actions.reshape(-1, A)[windows.action_rows],
        **windows.fields,
        episode_id=episode.astype(np.int32),
        step_id=step.astype(np.int32),
    )


@pytest.fixture(scope="module")
def draws(golden: dict[str, np.ndarray]) -> Draws:
    noise, unused = chunks(golden["bc_noise_x0"]), jnp.zeros((48, N, H, A))
    return Draws(
        flow_noise=noise,
        flow_time=1 - golden["bc_time"][:, 0],
        actor_noise=noise,
        actor_time=golden["bc_time"][:, 0],
        next_noise=chunks(golden["next_candidate_noise"]),
        candidate_noise=unused,
        dropout_keys=jax.random.split(jax.random.key(0), 48),
    )


@pytest.fixture(scope="module")
def targets(agent: Agent, batch: Batch, draws: Draws) -> Targets:
    return compute_targets(agent.algorithm, agent.networks(), batch, draws, jax.random.key(0))


def test_windows(golden: dict[str, np.ndarray], batch: Batch) -> None:
    """Successes in the middle of play: the discounted rewards, the masks and the steps that count."""
    learnable = np.asarray(batch.sequence_mask) > 0
    np.testing.assert_array_equal(batch.sequence_mask, golden["window_valid"][:, -1])
    returns = np.sum(np.asarray(batch.rewards) * 0.99 ** np.arange(H), axis=1)
    close(returns[learnable], golden["window_rewards"][learnable])
    np.testing.assert_array_equal(np.asarray(batch.masks)[learnable, -1], golden["window_masks"][learnable])
    inside = golden["starts"] % STEPS + np.arange(H)[:, None] < STEPS
    np.testing.assert_array_equal(golden["window_valid"], inside.T)


def test_targets(golden: dict[str, np.ndarray], agent: Agent, batch: Batch, targets: Targets) -> None:
    learnable = np.asarray(batch.sequence_mask) > 0
    close(np.asarray(targets.value)[learnable], golden["td_target"][learnable])


def test_losses_and_gradients(golden: dict[str, np.ndarray], agent: Agent, batch: Batch, draws: Draws) -> None:
    """Here a loss is the mean over what it may learn from, there over all windows or steps.

    Past the end of an episode the last action repeats here; there the actions of the next episode follow. They do not
    count, but the policy sees them.
    """
    params = Params(policy=agent.policy_params, critic=agent.critics.online)
    joint = JointLoss(agent, jax.random.key(0), trains_policy=True)
    actions = golden["actions"][golden["starts"][:, None] + np.arange(H)]
    batch = batch.replace(actions=actions, valid=golden["window_valid"].astype(np.float32))
    _, (record, _, _), _, grads = compute_gradients(joint, params, (batch, draws), 1)
    of_windows, of_steps = np.mean(batch.sequence_mask), np.mean(batch.valid)
    close(np.asarray(record.q).T, golden["q_per_critic"])
    close(np.mean(record.td_loss * batch.sequence_mask), golden["critic_loss"])
    close(np.sum(record.cloning) * of_steps, golden["bc_flow_loss"])

    kernel, bias = (golden["grad_norm/modules_actor_bc_flow/mlp/Dense_0/" + name] for name in ("kernel", "bias"))
    policy = {"/".join(map(str, path)): x[...] * of_steps for path, x in nnx.to_flat_state(grads.policy)}
    close(norm(policy["chunk_in/bias"]), bias)
    by_time = policy["chunk_in/bias"] - policy["time_in/kernel"][0]  # by the reversed time
    close(norm(policy["state_in/kernel"], policy["chunk_in/kernel"], by_time), kernel)
    for i, layer in enumerate(("hidden/0", "hidden/1", "hidden/2", "chunk_out"), start=1):
        for name in ("kernel", "bias"):
            close(norm(policy[f"{layer}/{name}"]), golden[f"grad_norm/modules_actor_bc_flow/mlp/Dense_{i}/{name}"])

    critic = {"/".join(map(str, path)): x[...] * of_windows for path, x in nnx.to_flat_state(grads.critic)}
    expected = {name.split("value_net/")[1]: x for name, x in golden.items() if "grad_norm/modules_critic" in name}
    close(norm(critic["observation_kernel"], critic["chunk_kernel"]), expected.pop("Dense_0/kernel"))
    close(norm(critic["bias"]), expected.pop("Dense_0/bias"))
    for name, value in expected.items():
        close(norm(critic[critic_name(name)]), value)


def test_acting(golden: dict[str, np.ndarray], agent: Agent, batch: Batch) -> None:
    chosen = choose_actions(
        acting_model(agent, average=False),
        jax.tree.map(jnp.asarray, batch.observations),
        chunks(golden["act_noise"]),
        jnp.full(48, N),
        jnp.zeros(48, jnp.uint32),
        num_steps=10,
    )
    close(np.asarray(chosen.actions).reshape(48, -1), golden["act_actions"])
    assert np.abs(chosen.actions).max() == 1, "some candidates must leave the bounds"


# -- from the golden's names and shapes to ours


def add_row(x: np.ndarray) -> np.ndarray:
    """Repeats the last step of every episode."""
    return np.concatenate([x, x[:, -1:]], axis=1)


def observation(state: np.ndarray) -> Observation:
    return Observation(images={}, image_masks={}, state=state)


def chunks(flat: np.ndarray) -> jax.Array:
    return jnp.asarray(flat).reshape(*flat.shape[:-1], H, A)


def norm(*arrays: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in arrays)))


def critic_name(name: str) -> str:
    """Our name of a layer of the golden's value net: Dense_4 is the output."""
    kind, _, rest = name.partition("_")
    number, _, leaf = rest.partition("/")
    if kind == "LayerNorm":
        return f"norms/{number}/{leaf}"
    return f"out/{leaf}" if number == "4" else f"hidden/{int(number) - 1}/{leaf}"


def critic_state(golden: dict[str, np.ndarray], name: str, like: nnx.State) -> nnx.State:
    prefix = f"params/modules_{name}/value_net/"
    values = {key.removeprefix(prefix): x for key, x in golden.items() if key.startswith(prefix)}
    first = values.pop("Dense_0/kernel")
    ours = {"observation_kernel": first[:, :37], "chunk_kernel": first[:, 37:], "bias": values.pop("Dense_0/bias")}
    return fill(like, ours | {critic_name(key): x for key, x in values.items()})


def policy_state(golden: dict[str, np.ndarray], like: nnx.State) -> nnx.State:
    prefix = "params/modules_actor_bc_flow/mlp/Dense_"
    values = {key.removeprefix(prefix): x for key, x in golden.items() if key.startswith(prefix)}
    first, by_time = values["0/kernel"][:-1], values["0/kernel"][-1:]
    ours = {"state_in/kernel": first[:37], "chunk_in/kernel": first[37:], "time_in/kernel": -by_time}
    ours["chunk_in/bias"] = values["0/bias"] + by_time[0]
    for i in range(3):
        ours |= {f"hidden/{i}/{name}": values[f"{i + 1}/{name}"] for name in ("kernel", "bias")}
    return fill(like, ours | {f"chunk_out/{name}": -values[f"4/{name}"] for name in ("kernel", "bias")})


def fill(like: nnx.State, values: dict[str, np.ndarray]) -> nnx.State:
    """A state with these values by path; every leaf of `like` must get one of the same shape."""
    flat = dict(nnx.to_flat_state(like))
    names = {path: "/".join(map(str, path)) for path in flat}
    assert set(names.values()) == set(values)
    for path, leaf in flat.items():
        assert leaf[...].shape == values[names[path]].shape
    return nnx.from_flat_state({path: leaf.replace(jnp.asarray(values[names[path]])) for path, leaf in flat.items()})
