"""Weights and gradients of the Q-chunking paper's code under our names and back.

There, the flow runs from noise at time 0 to actions at time 1; here it runs from noise at time 1 to actions at time 0.
So velocities change their sign, and time t becomes 1 - t.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.agents.networks import Params

STATE_DIM = 37
LAYERS = 5
Tree = dict[Any, Any]


def with_golden_weights(agent: Agent, golden: dict[str, np.ndarray]) -> Agent:
    """The agent with the weights of a golden file."""
    nets = _nested(golden, "params/")
    critics = agent.critics.replace(
        online=_filled(agent.critics.online, _to_critics(nets["modules_critic"]["value_net"])),
        target=_filled(agent.critics.target, _to_critics(nets["modules_target_critic"]["value_net"])),
    )
    agent = agent.replace(
        critics=critics, policy_params=_filled(agent.policy_params, _to_flow(nets["modules_actor_bc_flow"]["mlp"]))
    )
    if not jax.tree.leaves(agent.improvement.params):
        return agent
    one_step = dict(enumerate(_dense(nets["modules_actor_onestep_flow"]["mlp"])))
    return agent.replace(
        improvement=agent.improvement.replace(params=_filled(agent.improvement.params, {"mlp": {"layers": one_step}}))
    )


def golden_norms(grads: Params) -> dict[str, float]:
    """The norm of each array of the gradient, by the golden's names."""
    assert grads.policy is not None and grads.critic is not None
    flow, critic = nnx.to_pure_dict(grads.policy), nnx.to_pure_dict(grads.critic)
    by_time = flow["chunk_in"]["bias"][None] - flow["time_in"]["kernel"]  # by the reversed time
    flow_in = jnp.concatenate([flow["state_in"]["kernel"], flow["chunk_in"]["kernel"], by_time])
    critic_in = jnp.concatenate([critic["observation_kernel"], critic["chunk_kernel"]], axis=1)
    dense = {
        "modules_actor_bc_flow/mlp": [
            {"kernel": flow_in, "bias": flow["chunk_in"]["bias"]},
            *flow["hidden"].values(),
            flow["chunk_out"],
        ],
        "modules_critic/value_net": [
            {"kernel": critic_in, "bias": critic["bias"]},
            *critic["hidden"].values(),
            critic["out"],
        ],
    }
    if grads.improvement is not None:
        one_step = nnx.to_pure_dict(grads.improvement)
        dense["modules_actor_onestep_flow/mlp"] = list(one_step["mlp"]["layers"].values())
    layers = {f"{net}/Dense_{i}": layer for net, several in dense.items() for i, layer in enumerate(several)}
    layers |= {f"modules_critic/value_net/LayerNorm_{i}": norm for i, norm in critic["norms"].items()}
    return {f"{name}/{leaf}": float(jnp.linalg.norm(x)) for name, layer in layers.items() for leaf, x in layer.items()}


def _nested(golden: dict[str, np.ndarray], prefix: str) -> Tree:
    """A part of the file as nested dicts of arrays."""
    tree: Tree = {}
    for name, value in golden.items():
        if name.startswith(prefix):
            *path, leaf = name.removeprefix(prefix).split("/")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[leaf] = value
    return tree


def _dense(net: Tree) -> list[Tree]:
    return [net[f"Dense_{i}"] for i in range(LAYERS)]


def _to_flow(net: Tree) -> Tree:
    first, *hidden, last = _dense(net)
    kernel = first["kernel"]
    return {
        "state_in": {"kernel": kernel[:STATE_DIM]},
        "chunk_in": {"kernel": kernel[STATE_DIM:-1], "bias": first["bias"] + kernel[-1]},
        "time_in": {"kernel": -kernel[-1:]},
        "hidden": dict(enumerate(hidden)),
        "chunk_out": jax.tree.map(np.negative, last),
    }


def _to_critics(net: Tree) -> Tree:
    first, *hidden, last = _dense(net)
    return {
        "observation_kernel": first["kernel"][:, :STATE_DIM],
        "chunk_kernel": first["kernel"][:, STATE_DIM:],
        "bias": first["bias"],
        "hidden": dict(enumerate(hidden)),
        "norms": {i: net[f"LayerNorm_{i}"] for i in range(LAYERS - 1)},
        "out": last,
    }


def _filled(state: nnx.State, values: Tree) -> nnx.State:
    """The parameters with these values; every parameter must be given, in its shape."""
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(state))
    assert shapes == jax.tree.map(np.shape, values)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    return state
