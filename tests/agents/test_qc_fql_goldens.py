"""QC-FQL against numbers of the Q-chunking paper's own code: equal weights, windows and noise give equal results."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import quick_jit
from flax import nnx

from acrlpd.agents.accumulation import compute_gradients
from acrlpd.agents.algorithm import JointLoss
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.networks import Draws, Params
from acrlpd.batch import Batch
from acrlpd.config import ACRLPDHyperparams, LossWeights, QChunkingConfig, RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import acting_model, choose_actions

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
H, A, STATE, HIDDEN = 5, 5, 37, (64,) * 4
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "qc_fql.npz") as file:
        return dict(file)


def nested(golden, prefix):
    """A part of the file as nested dicts of arrays."""
    tree = {}
    for name, value in golden.items():
        if name.startswith(prefix + "/"):
            *path, leaf = name.removeprefix(prefix + "/").split("/")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[leaf] = value
    return tree


def to_flow(net):
    """Their flow time runs from noise to action, ours the other way: t' = 1 - t, and the velocity changes its sign."""
    first, *hidden, last = (net["mlp"][f"Dense_{i}"] for i in range(5))
    kernel = first["kernel"]
    return {
        "state_in": {"kernel": kernel[:STATE]},
        "chunk_in": {"kernel": kernel[STATE:-1], "bias": first["bias"] + kernel[-1]},
        "time_in": {"kernel": -kernel[-1:]},
        "hidden": dict(enumerate(hidden)),
        "chunk_out": jax.tree.map(np.negative, last),
    }


def to_critics(net):
    first, *hidden, last = (net["value_net"][f"Dense_{i}"] for i in range(5))
    return {
        "observation_kernel": first["kernel"][:, :STATE],
        "chunk_kernel": first["kernel"][:, STATE:],
        "bias": first["bias"],
        "hidden": dict(enumerate(hidden)),
        "norms": {i: net["value_net"][f"LayerNorm_{i}"] for i in range(4)},
        "out": last,
    }


def to_one_step(net):
    return {"mlp": {"layers": {i: net["mlp"][f"Dense_{i}"] for i in range(5)}}}


def filled(state, values):
    """The parameters with these values; every parameter must be given, in its shape."""
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    return state


@pytest.fixture(scope="module")
def agent(golden):
    """Weights of the losses make our means over valid steps the reference's means over all steps."""
    valid = golden["window_valid"]
    config = RLTrainConfig(
        name="test",
        model=StateFlowPolicyConfig(state_dim=STATE, action_dim=A, action_horizon=H, hidden_dims=HIDDEN),
        critic=MLPCritics(num_critics=2, hidden_dims=HIDDEN, q_aggregation="mean"),
        improvement=Distillation(distillation_weight=float(golden["alpha"]), hidden_dims=HIDDEN),
        acrlpd=ACRLPDHyperparams(
            loss_weights=LossWeights(critic_weight=valid[:, -1].mean(), actor_weight=1.0, bc_weight=valid.mean()),
            num_action_samples=1,
            sampling_steps=10,
            discount=float(golden["discount"]),
            action_bounds=(-1.0, 1.0),
            learnable_temperature=False,
            ema_decay=None,
        ),
        qchunking=QChunkingConfig(horizon_length=H, action_dim=A),
    )
    agent = quick_jit(lambda key: create_agent(config, key))(KEY)
    nets = nested(golden, "params")
    return agent.replace(
        policy_params=filled(agent.policy_params, to_flow(nets["modules_actor_bc_flow"])),
        critics=agent.critics.replace(
            online=filled(agent.critics.online, to_critics(nets["modules_critic"])),
            target=filled(agent.critics.target, to_critics(nets["modules_target_critic"])),
        ),
        improvement_params=filled(agent.improvement_params, to_one_step(nets["modules_actor_onestep_flow"])),
    )


def chunks(noise):
    return jnp.asarray(noise, jnp.float32).reshape(-1, H, A)


def observe(states):
    return Observation(images={}, image_masks={}, state=jnp.asarray(states))


@pytest.fixture(scope="module")
def inputs(golden):
    starts = golden["starts"]
    rows, b = starts[:, None] + np.arange(H), len(starts)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    masks = np.minimum.accumulate(golden["masks"][rows], axis=1)
    batch = Batch(
        observations=observe(golden["observations"][starts]),
        next_observations=observe(golden["next_observations"][rows[:, -1]]),
        actions=f32(golden["actions"][rows]),
        valid=f32(golden["window_valid"]),
        rewards=f32(golden["rewards"][rows]),
        masks=f32(masks),
        terminals=f32(golden["terminals"][rows]),
        next_terminal=f32(1 - masks[:, -1]),
        sequence_mask=f32(golden["window_valid"][:, -1]),
        episode_id=jnp.zeros(b, jnp.int32),
        step_id=jnp.asarray(starts, jnp.int32),
    )
    draws = Draws(
        flow_noise=chunks(golden["bc_noise_x0"]),
        flow_time=1 - jnp.asarray(golden["bc_time"])[:, 0],
        actor_noise=chunks(golden["distill_noise"]),
        actor_time=jnp.zeros(b),
        next_noise=chunks(golden["next_candidate_noise"])[:, None],
        candidate_noise=jnp.zeros((b, 1, H, A)),
        dropout_keys=jax.random.split(KEY, b),
    )
    return batch, draws


def near(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def result(agent, inputs):
    params = Params(policy=agent.policy_params, critic=agent.critics.online, improvement=agent.improvement_params)

    @quick_jit
    def compute(params, inputs):
        joint = JointLoss(agent, KEY, trains_policy=True)
        return compute_gradients(joint, params, inputs, 1)

    return compute(params, inputs)


def test_qc_fql_losses_and_targets(golden, result):
    _, (record, _, _), targets, _ = result
    valid = golden["window_valid"]
    counts = valid[:, -1] == 1  # where a window leaves its episode, neither code looks at the target
    near(targets.value[counts], golden["td_target"][counts])
    near(record.q.T, golden["q_per_critic"])
    critic_loss = np.mean(np.asarray(record.td_loss) * valid[:, -1])
    near(critic_loss, golden["critic_loss"])
    bc_loss = float(jnp.sum(record.cloning)) * valid.mean()
    near(bc_loss, golden["bc_flow_loss"])
    near(bc_loss + float(jnp.sum(record.improvement)), golden["actor_loss"])


def test_qc_fql_chunks(agent, golden, inputs):
    batch, draws = inputs
    networks, algorithm = agent.networks(), agent.algorithm

    @quick_jit
    def compute(batch, draws):
        context = networks.encode(batch.observations)
        later = networks.encode(batch.next_observations)
        noise = draws.actor_noise[:, None]
        flow = algorithm.clip(networks.policy.denoise(context, noise, num_steps=10))
        next_actions = algorithm.candidates(networks, later, batch.next_observations, draws.next_noise)
        next_q = networks.critics.target_ensemble(
            None, batch.next_observations.state, algorithm.critic_chunks(next_actions)
        )
        return flow, networks.improvement(context, batch.observations, noise), next_actions, next_q[:, 0]

    flow, chunk, next_actions, next_q = compute(batch, draws)
    flat = lambda x: np.asarray(x).reshape(-1, H * A)  # noqa: E731
    near(flat(flow), golden["distill_flow_actions"])
    near(flat(chunk), golden["distill_actor_actions"])
    near(np.mean(np.square(flow - chunk)), golden["distill_loss"])
    near(flat(next_actions), golden["next_actions"])
    near(next_q.T, golden["next_q_per_critic"])
    noise = chunks(golden["act_noise"])[:, None]
    chosen = choose_actions(
        acting_model(agent, average=False), batch.observations, noise, jnp.ones(len(noise), jnp.int32), num_steps=10
    )
    near(flat(chosen.actions), golden["act_actions"])


def test_qc_fql_gradients(golden, result):
    """The norm of each leaf's gradient, in their leaves."""
    grads = jax.tree.map(
        np.asarray, [nnx.to_pure_dict(g) for g in (result[3].policy, result[3].critic, result[3].improvement)]
    )
    flow, critic, one_step = grads
    time = flow["chunk_in"]["bias"][None] - flow["time_in"]["kernel"]  # through t' = 1 - t
    first = {
        "kernel": np.concatenate([flow["state_in"]["kernel"], flow["chunk_in"]["kernel"], time]),
        "bias": flow["chunk_in"]["bias"],
    }
    kernel = np.concatenate([critic["observation_kernel"], critic["chunk_kernel"]], axis=1)
    layers = {
        "modules_actor_bc_flow/mlp": [first, *flow["hidden"].values(), flow["chunk_out"]],
        "modules_actor_onestep_flow/mlp": list(one_step["mlp"]["layers"].values()),
        "modules_critic/value_net": [
            {"kernel": kernel, "bias": critic["bias"]},
            *critic["hidden"].values(),
            critic["out"],
        ],
    }
    found = {
        f"{net}/Dense_{i}/{leaf}": g
        for net, dense in layers.items()
        for i, d in enumerate(dense)
        for leaf, g in d.items()
    }
    found |= {
        f"modules_critic/value_net/LayerNorm_{i}/{leaf}": g
        for i, norm in critic["norms"].items()
        for leaf, g in norm.items()
    }
    expected = {
        name.removeprefix("grad_norm/"): value for name, value in golden.items() if name.startswith("grad_norm/")
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(np.linalg.norm(found[name]), value, rtol=0, atol=2e-5, err_msg=name)
