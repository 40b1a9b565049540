"""What can be served: exported directories, checkpoints of runs, and plain openpi checkpoints.

All have `params/` and `assets/` as openpi has them. An export adds acrlpd.json and, unless told otherwise,
`critic/`; a run's checkpoint has its config in `run/` and its critics in `train_state/`.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.config.tree import from_dict
from acrlpd.data.pipeline.dataset import norm_stats_dir
from acrlpd.data.pipeline.norm_stats import NormStats, load_norm_stats
from acrlpd.models.openpi_checkpoint import load_pi0_weights_from_openpi
from acrlpd.policies.levels import ServingLevel, trained_level
from acrlpd.policies.served_model import ServedModel
from acrlpd.runs.directory import saved_steps
from acrlpd.training.checkpoints.items import ASSETS, PARAMS, RUN, RUN_FILE, TRAIN_STATE
from acrlpd.training.checkpoints.metadata import CheckpointError, load_checkpoint_metadata

EXPORT_FILE = "acrlpd.json"
EXPORT_FORMAT = 1
CRITIC = "critic"
# Where the online critics are within `critic/` and within `train_state/`.
CRITICS_IN_TREE = ("critics", "online")

Kind = Literal["export", "run", "openpi"]


@dataclasses.dataclass(frozen=True)
class PolicyCheckpoint:
    """A directory that can be served, before its arrays are read."""

    directory: pathlib.Path
    kind: Kind
    rl_config: RLTrainConfig
    level: ServingLevel
    step: int | None
    has_critics: bool

    @property
    def norm_stats_directory(self) -> pathlib.Path | None:
        """The run's norm statistics; None where it had none (fake data)."""
        assets = self.directory / ASSETS
        found = sorted(path.parent for path in assets.rglob("norm_stats.json"))
        if len(found) <= 1:
            return found[0] if found else None
        asset_id = norm_stats_dir(self.rl_config.data).relative_to(self.rl_config.data.assets_dir)
        if assets / asset_id not in found:
            names = ", ".join(str(path.relative_to(assets)) for path in found)
            raise CheckpointError(f"{assets} has norm statistics of {names}; set data.asset_id to one of them")
        return assets / asset_id

    def load_norm_stats(self) -> dict[str, NormStats] | None:
        directory = self.norm_stats_directory
        if directory is None:
            if self.kind == "openpi":
                raise CheckpointError(
                    f"{self.directory} has no {ASSETS}/<asset_id>/norm_stats.json: the policy's actions could not "
                    "be turned into the robot's units. Copy the statistics it was trained with there"
                )
            return None
        return load_norm_stats(directory)

    def load_model(self, *, dtype: str | None = None) -> ServedModel:
        """The arrays, on the first device; policy parameters in `dtype`, None: as they were trained."""
        agent = self._abstract_agent()
        params = nnx.merge_state(agent.policy_params, agent.frozen_params)
        params = load_pi0_weights_from_openpi(self.directory, _on_first_device(params, dtype), missing_regex=None)
        critics = None
        if self.has_critics:
            item = CRITIC if self.kind == "export" else TRAIN_STATE
            critics = _restore_state(self.directory / item, CRITICS_IN_TREE, _on_first_device(agent.critics.online))
        return ServedModel(
            params=params,
            critic_params=critics,
            policy_def=agent.policy_def,
            critic_def=agent.critics.network if self.has_critics else None,
            algorithm=agent.algorithm,
        )

    def _abstract_agent(self) -> Agent:
        return jax.eval_shape(partial(create_agent, self.rl_config), jax.random.key(0))


def open_policy_checkpoint(path: str | pathlib.Path, rl_config: RLTrainConfig | None = None) -> PolicyCheckpoint:
    """Finds out what `path` is. The newest checkpoint of a run directory counts.

    `rl_config` is for plain openpi checkpoints, which do not say what they are.
    """
    directory = pathlib.Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory: expected an export, a run or a checkpoint, on this machine"
        )
    for file, open_directory in ((EXPORT_FILE, _open_export), (f"{RUN}/{RUN_FILE}", _open_run_checkpoint)):
        if not (directory / file).is_file():
            continue
        if rl_config is not None:
            raise CheckpointError(f"--config is for checkpoints of openpi; {directory / file} says what this one is")
        try:
            return open_directory(directory)
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{directory / file} is damaged or of another version: {type(error).__name__}: {error}"
            ) from error
    if (directory / PARAMS / "_METADATA").is_file():
        return _open_openpi_checkpoint(directory, rl_config)
    steps = saved_steps(directory)
    if not steps:
        raise CheckpointError(
            f"{directory} is neither an exported directory ({EXPORT_FILE}), nor a run (numbered checkpoints), nor "
            f"a checkpoint of acrlpd ({RUN}/{RUN_FILE}) or openpi ({PARAMS}/_METADATA)"
        )
    return open_policy_checkpoint(directory / str(steps[-1]), rl_config)


def _open_export(directory: pathlib.Path) -> PolicyCheckpoint:
    content = json.loads((directory / EXPORT_FILE).read_text())
    if content.get("format") != EXPORT_FORMAT:
        raise CheckpointError(
            f"{directory / EXPORT_FILE} has format {content.get('format')}; this version reads {EXPORT_FORMAT}. "
            "Export the run again"
        )
    return PolicyCheckpoint(
        directory,
        "export",
        from_dict(RLTrainConfig, content["config"]),
        ServingLevel(**content["serving"]),
        content["step"],
        has_critics=content["critics"] is not None,
    )


def _open_run_checkpoint(directory: pathlib.Path) -> PolicyCheckpoint:
    metadata = load_checkpoint_metadata(directory)
    rl_config = from_dict(RLTrainConfig, metadata["config"])
    # Cloning alone leaves the critics as they were drawn: to choose by them is worse than not to choose.
    has_critics = rl_config.acrlpd.loss_weights.critic_weight > 0
    level = trained_level(rl_config)
    if not has_critics:
        level = dataclasses.replace(level, best_of_n=1, num_critics=0)
    return PolicyCheckpoint(directory, "run", rl_config, level, metadata["step"], has_critics)


def _open_openpi_checkpoint(directory: pathlib.Path, rl_config: RLTrainConfig | None) -> PolicyCheckpoint:
    if rl_config is None:
        raise CheckpointError(
            f"{directory} is a checkpoint of openpi, which does not say what model and robot it is for. There is "
            "nothing to export; to serve it name its config, for example --config aloha"
        )
    level = ServingLevel(rl_config.acrlpd.sampling_steps, best_of_n=1, num_critics=0)
    step = int(directory.name) if directory.name.isdigit() else None
    return PolicyCheckpoint(directory, "openpi", rl_config, level, step, has_critics=False)


def _on_first_device(state: nnx.State, dtype: str | None = None) -> nnx.State:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place), state)


def _restore_state(directory: pathlib.Path, prefix: tuple[str, ...], abstract: nnx.State) -> nnx.State:
    """Reads one branch of a stored tree, and nothing of the rest."""
    leaves = {(*prefix, *map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(abstract)}
    args = {path: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype) for path, x in leaves.items()}
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(
                directory,
                ocp.args.PyTreeRestore(
                    item=nest(dict.fromkeys(leaves, 0)), restore_args=nest(args), partial_restore=True
                ),
            )
    except Exception as error:  # Orbax raises plain Exception around what tensorstore found
        reason = str(error).splitlines()[0].partition(" [tensorstore_spec")[0]
        raise CheckpointError(f"{directory} is damaged or incomplete: {reason}") from error
    values = []
    for path, leaf in nnx.to_flat_state(abstract):
        value = restored
        for key in (*prefix, *map(str, path)):
            value = value[key]
        if value.shape != leaf.get_value().shape:
            name = "/".join(map(str, path))
            raise CheckpointError(f"{directory}: {name} has shape {value.shape}, expected {leaf.get_value().shape}")
        values.append((path, leaf.replace(value)))
    return nnx.from_flat_state(values)


def nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dicts from paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
