"""Which array of an agent lies in which item of a checkpoint, and under which name."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util

from acrlpd.agents import Agent
from acrlpd.policies.checkpoint import critic_branches
from acrlpd.runs.checkpoint_layout import CRITIC, PARAMS, TRAIN_STATE


def agent_items(agent: Agent, *, average: bool) -> dict[str, Any]:
    """The arrays of an agent (or their shapes) as the items params/, critic/ and train_state/: nested dicts by name.

    With `average`, params/ holds the moving average of the policy.
    """
    return traverse_util.unflatten_dict(_stored_leaves(agent, average))


def agent_from_items(template: Agent, items: Mapping[str, Any], *, average: bool) -> Agent:
    """The agent with the structure of `template` and the arrays of a checkpoint."""
    arrays = traverse_util.flatten_dict(items)
    leaves = [arrays[name] for name in _stored_leaves(template, average)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _stored_leaves(agent: Agent, average: bool) -> dict[tuple[str, ...], Any]:
    """Every leaf of an agent by its item and its names within the item, in the order of the agent's leaves.

    No array is stored twice. What is neither of the policy nor needed to choose among candidates lies in train_state/,
    under the names of the agent's fields, so a new field of the agent is stored without a change here.
    """
    policy_fields = ("ema_params" if average else "policy_params", "frozen_params")
    branches = critic_branches(agent.algorithm.acrlpd).values()
    stored: dict[tuple[str, ...], Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(agent)[0]:
        name = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if name[0] in policy_fields:
            stored[PARAMS, "params", *name[1:]] = leaf  # openpi's tree, in which each array is called "value"
            continue
        item = CRITIC if any(name[: len(branch)] == branch for branch in branches) else TRAIN_STATE
        stored[item, *(name[:-1] if name[-1] == "value" else name)] = leaf
    return stored
