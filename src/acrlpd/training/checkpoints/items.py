"""What a step directory holds, and the way from an agent to it and back.

    params/       the policy as stock openpi loads it: the moving average where there is one
    assets/       <asset_id>/norm_stats.json, where openpi looks for it
    train_state/  every other array of the agent
    run/          run.json: config, data cursor, random key, open metrics, versions

No array is stored twice: what is in params/ is not in train_state/.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.models.openpi_checkpoint import openpi_tree

PARAMS = "params"
ASSETS = "assets"
TRAIN_STATE = "train_state"
RUN = "run"
RUN_FILE = "run.json"

Name = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AgentArrays:
    """The arrays of an agent (or their shapes), as they are stored."""

    params: dict[str, Any]  # openpi's tree
    train_state: dict[str, Any]  # nested dicts by the names of the agent's fields

    @property
    def num_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.params, self.train_state)))


def served_field(agent: Agent, rl_config: RLTrainConfig) -> str:
    """Which parameters of the policy go into params/."""
    average = rl_config.openpi_compatibility.enable_ema_for_inference and agent.ema_params is not None
    return "ema_params" if average else "policy_params"


def served_params(agent: Agent, rl_config: RLTrainConfig) -> nnx.State:
    """All parameters of the policy as they go into params/."""
    return nnx.merge_state(getattr(agent, served_field(agent, rl_config)), agent.frozen_params)


def split_agent(agent: Agent, served: str) -> AgentArrays:
    policy = nnx.merge_state(getattr(agent, served), agent.frozen_params)
    rest = agent.replace(**{served: None, "frozen_params": None})
    return AgentArrays(openpi_tree(policy), _nest(_named_leaves(rest)))


def join_agent(template: Agent, arrays: AgentArrays, served: str) -> Agent:
    """The agent with the structure of `template` and the arrays of a checkpoint."""
    rest = template.replace(**{served: None, "frozen_params": None})
    named = {name: _lookup(arrays.train_state, name) for name in _named_leaves(rest)}
    agent = jax.tree.unflatten(jax.tree.structure(rest), named.values())

    def policy_part(state: nnx.State) -> nnx.State:
        return nnx.from_flat_state(
            [
                (path, leaf.replace(_lookup(arrays.params, ("params", *map(str, path), "value"))))
                for path, leaf in nnx.to_flat_state(state)
            ]
        )

    return agent.replace(
        **{served: policy_part(getattr(template, served)), "frozen_params": policy_part(template.frozen_params)}
    )


def _named_leaves(tree: Any) -> dict[Name, Any]:
    """Leaves by name, in the order of the tree's leaves."""
    named: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = tuple(_key_name(key) for key in path)
        named[name[:-1] if name[-1] == "value" else name] = leaf  # nnx variables hold their array in `value`
    return named


def _key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown kind of key in a pytree: {key!r}")


def _nest(named: Mapping[Name, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        node = tree
        for key in name[:-1]:
            node = node.setdefault(key, {})
        node[name[-1]] = leaf
    return tree


def _lookup(tree: Any, name: Name) -> Any:
    for key in name:
        tree = tree[key]
    return tree


class AssetsHandler(ocp.CheckpointHandler):
    """Writes small files into an item of a step directory."""

    def save(self, directory: epath.Path, args: "AssetsSave") -> None:
        if jax.process_index() != 0:
            return
        for name, content in args.files.items():
            path = pathlib.Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def restore(self, directory: epath.Path, args: "AssetsRestore") -> dict[str, bytes]:
        root = pathlib.Path(directory)
        files = (path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@ocp.args.register_with_handler(AssetsHandler, for_save=True)
@dataclasses.dataclass
class AssetsSave(ocp.args.CheckpointArgs):
    """Relative path -> content."""

    files: Mapping[str, bytes]


@ocp.args.register_with_handler(AssetsHandler, for_restore=True)
@dataclasses.dataclass
class AssetsRestore(ocp.args.CheckpointArgs):
    """Nothing to say."""
