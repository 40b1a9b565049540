"""Critics of another run as the initial critics of an agent."""

import pathlib

import jax
import jax.numpy as jnp

from acrlpd.agents import Agent
from acrlpd.checksums import verified
from acrlpd.models.openpi_checkpoint import restore_arrays
from acrlpd.policies.checkpoint import critic_branches
from acrlpd.runs.checkpoint_layout import load_described_config
from acrlpd.training.checkpoints.manager import require_equal_shapes


def with_critics(agent: Agent, directory: pathlib.Path) -> Agent:
    """The agent with the critics in the `critic` directory of a checkpoint: those that act in its run.

    The target critics, and a moving average if the agent keeps one, begin as copies.
    """
    branch = critic_branches(load_described_config(directory.parent).acrlpd)["online"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(agent.critics.online)
    wanted = {(*branch, *(jax.tree_util.keystr((key,), simple=True) for key in path[:-1])): x for path, x in leaves}
    with verified(directory, share=(jax.process_index(), jax.process_count())):
        require_equal_shapes(directory, wanted, within=branch)
        found = restore_arrays(directory, wanted)
    online = jax.tree.unflatten(structure, [found[name] for name in wanted])
    average = None if agent.critics.average is None else jax.tree.map(jnp.copy, online)
    target = jax.tree.map(jnp.copy, online)
    return agent.replace(critics=agent.critics.replace(online=online, target=target, average=average))
