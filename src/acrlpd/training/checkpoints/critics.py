"""Critics of another run as the initial critics of an agent."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from acrlpd.agents import Agent
from acrlpd.checksums import verified
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.openpi_checkpoint import restore_arrays
from acrlpd.policies.checkpoint import critic_branches
from acrlpd.runs.checkpoint_layout import load_described_config
from acrlpd.training.checkpoints.reader import Names, require_equal_shapes


def check_critics(rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
    """Refuses critics that are damaged or do not fit the config. Called before anything trains, baselines included."""
    agent = jax.eval_shape(lambda: create_agent(rl_config, jax.random.key(0)))
    branch, wanted = _wanted(agent, directory)
    with verified(directory, share=(jax.process_index(), jax.process_count())):
        require_equal_shapes(directory, wanted, within=branch)


def with_critics(agent: Agent, directory: pathlib.Path) -> Agent:
    """The agent with the critics in the `critic` directory of a checkpoint: those that act in its run.

    The target critics, and a moving average if the agent keeps one, begin as copies.
    """
    branch, wanted = _wanted(agent, directory)
    with verified(directory, share=(jax.process_index(), jax.process_count())):
        require_equal_shapes(directory, wanted, within=branch)
        found = restore_arrays(directory, wanted)
    structure = jax.tree.structure(agent.critics.online)
    online = jax.tree.unflatten(structure, [found[name] for name in wanted])
    average = None if agent.critics.average is None else jax.tree.map(jnp.copy, online)
    target = jax.tree.map(jnp.copy, online)
    return agent.replace(critics=agent.critics.replace(online=online, target=target, average=average))


def _wanted(agent: Agent, directory: pathlib.Path) -> tuple[Names, dict[Names, Any]]:
    """The branch with the acting critics of a checkpoint, and the agent's critics by their names in that branch."""
    branch = critic_branches(load_described_config(directory.parent).acrlpd)["online"]
    leaves = jax.tree.leaves_with_path(agent.critics.online)
    names = ([jax.tree_util.keystr((key,), simple=True) for key in path[:-1]] for path, _ in leaves)
    return branch, {(*branch, *name): leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
