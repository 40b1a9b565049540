"""Opening any checkpoint: exported directories, runs, checkpoints of runs, and plain openpi checkpoints.

All of them have `params/` and `assets/` as openpi has them. An export adds acrlpd.json and, unless it was made without
critics, `critic/`. A run's checkpoint has its config in `run/` and its critics in `train_state/`.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.config.tree import from_dict
from acrlpd.data.pipeline.dataset import norm_stats_dir
from acrlpd.data.pipeline.norm_stats import NormStats, load_norm_stats
from acrlpd.data.pipeline.rewards import RewardOrigin
from acrlpd.data.pipeline.tokenizer import LongPrompts
from acrlpd.models.openpi_checkpoint import load_pi0_weights_from_openpi
from acrlpd.policies.acting_model import ActingCritics, ActingModel, acting_model
from acrlpd.policies.levels import trained_level
from acrlpd.policies.policy import Policy, check_best_of_n, create_policy
from acrlpd.robots.base import ServingLevel
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    PARAMS,
    RUN,
    RUN_FILE,
    TRAIN_STATE,
    CheckpointError,
    load_checkpoint_metadata,
)
from acrlpd.runs.directory import saved_steps

EXPORT_FILE = "acrlpd.json"
EXPORT_FORMAT = 1
CRITIC = "critic"
# Fields of `ActingCritics` -> their branches within `critic/` and within `train_state/`.
_BRANCHES = {
    "online": ("critics", "online"),
    "temperature": ("temperature_params",),
    "improvement": ("improvement_params",),
}

Kind = Literal["export", "run", "openpi"]
_Tree = TypeVar("_Tree", bound=Any)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory that holds a policy, before its arrays are read."""

    directory: pathlib.Path
    kind: Kind
    rl_config: RLTrainConfig
    level: ServingLevel
    step: int | None
    has_critics: bool
    # Where the rewards of the training data came from (`StepRewards.origin`); None where nobody knows.
    reward_origin: RewardOrigin | None = None

    @property
    def norm_stats_directory(self) -> pathlib.Path | None:
        """The directory of the norm statistics; None for a policy that was trained without them (on fake data)."""
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
        """The norm statistics that the policy was trained with."""
        directory = self.norm_stats_directory
        if directory is None:
            if self.kind == "openpi":
                raise CheckpointError(
                    f"{self.directory} has no {ASSETS}/<asset_id>/norm_stats.json: the policy's actions could not "
                    "be turned into the robot's units. Copy the statistics it was trained with there"
                )
            return None
        return load_norm_stats(directory)

    def load_model(self, *, dtype: str | None = None) -> ActingModel:
        """Reads the arrays to the first device; policy parameters in `dtype`, None: as they were trained."""
        agent = jax.eval_shape(partial(create_agent, self.rl_config), jax.random.key(0))
        model = acting_model(agent, self.rl_config)
        params = _on_first_device(model.params, dtype)
        params = load_pi0_weights_from_openpi(self.directory, params, missing_regex=None)
        critics = None
        if self.has_critics:
            assert model.critics is not None
            item = CRITIC if self.kind == "export" else TRAIN_STATE
            critics = _restore_critics(self.directory / item, _on_first_device(model.critics))
        return model.replace(params=params, critics=critics)


def load_policy(
    checkpoint: Checkpoint,
    *,
    best_of_n: int | None = None,
    num_steps: int | None = None,
    long_prompts: LongPrompts = "cut",
) -> Policy:
    """The policy of a checkpoint, with parameters in the model's compute precision, as openpi serves them.

    Candidates and denoising steps are by default those of the checkpoint's level.
    """
    norm_stats = checkpoint.load_norm_stats()
    best_of_n = checkpoint.level.best_of_n if best_of_n is None else best_of_n
    check_best_of_n(best_of_n, has_critics=checkpoint.has_critics)  # before gigabytes are read
    return create_policy(
        checkpoint.load_model(dtype=checkpoint.rl_config.model.dtype),
        checkpoint.rl_config,
        norm_stats,
        best_of_n=best_of_n,
        num_steps=checkpoint.level.num_steps if num_steps is None else num_steps,
        long_prompts=long_prompts,
    )


def open_checkpoint(path: str | pathlib.Path, rl_config: RLTrainConfig | None = None) -> Checkpoint:
    """Finds out what `path` is. Of a run directory the newest checkpoint is taken.

    `rl_config` is for plain openpi checkpoints, which do not say for which model and robot they are.
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
    return open_checkpoint(directory / str(steps[-1]), rl_config)


def needs_config(path: str | pathlib.Path) -> bool:
    """Whether `path` is a plain openpi checkpoint, which needs a config to be opened."""
    directory = pathlib.Path(path).expanduser()
    described = (directory / EXPORT_FILE).is_file() or (directory / RUN / RUN_FILE).is_file()
    return not described and (directory / PARAMS / "_METADATA").is_file()


def _open_export(directory: pathlib.Path) -> Checkpoint:
    content = json.loads((directory / EXPORT_FILE).read_text())
    if content.get("format") != EXPORT_FORMAT:
        raise CheckpointError(
            f"{directory / EXPORT_FILE} has format {content.get('format')}; this version reads {EXPORT_FORMAT}. "
            "Export the run again"
        )
    return Checkpoint(
        directory,
        "export",
        from_dict(RLTrainConfig, content["config"]),
        ServingLevel(**content["serving"]),
        content["step"],
        has_critics=content["critics"] is not None,
        reward_origin=_reward_origin(content),
    )


def _open_run_checkpoint(directory: pathlib.Path) -> Checkpoint:
    metadata = load_checkpoint_metadata(directory)
    rl_config = from_dict(RLTrainConfig, metadata["config"])
    # Cloning alone leaves the critics as they were initialised, so they must not choose.
    has_critics = rl_config.acrlpd.loss_weights.critic_weight > 0
    level = trained_level(rl_config)
    if not has_critics:
        level = dataclasses.replace(level, best_of_n=1, num_critics=0)
    return Checkpoint(
        directory, "run", rl_config, level, metadata["step"], has_critics, reward_origin=_reward_origin(metadata)
    )


def _reward_origin(content: Mapping[str, Any]) -> RewardOrigin | None:
    name = content.get("reward_origin")
    return None if name is None else RewardOrigin[name]


def _open_openpi_checkpoint(directory: pathlib.Path, rl_config: RLTrainConfig | None) -> Checkpoint:
    if rl_config is None:
        raise CheckpointError(
            f"{directory} is a checkpoint of openpi, which does not say for which model and robot it is. To serve or "
            "evaluate it, name its config, for example --config aloha; there is nothing to export"
        )
    level = ServingLevel(rl_config.acrlpd.sampling_steps, best_of_n=1, num_critics=0)
    step = int(directory.name) if directory.name.isdigit() else None
    return Checkpoint(directory, "openpi", rl_config, level, step, has_critics=False)


def critic_arrays(critics: ActingCritics) -> dict[tuple[str, ...], Any]:
    """What critics need to choose, by its path within `critic/` and within `train_state/`."""
    return {
        (*branch, *map(str, path)): leaf
        for field, branch in _BRANCHES.items()
        for path, leaf in nnx.to_flat_state(getattr(critics, field))
    }


def _on_first_device(tree: _Tree, dtype: str | None = None) -> _Tree:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place), tree)


def _restore_critics(directory: pathlib.Path, abstract: ActingCritics) -> ActingCritics:
    """Reads what critics need to choose, and nothing else of the stored tree."""
    wanted = {name: leaf.get_value() for name, leaf in critic_arrays(abstract).items()}
    args = {name: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype) for name, x in wanted.items()}
    request = ocp.args.PyTreeRestore(
        item=unflatten_dict(dict.fromkeys(wanted, 0)), restore_args=unflatten_dict(args), partial_restore=True
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = flatten_dict(checkpointer.restore(directory, request))
    except Exception as error:  # Orbax raises plain Exception around what tensorstore found
        reason = str(error).splitlines()[0].partition(" [tensorstore_spec")[0]
        raise CheckpointError(f"{directory} is damaged or incomplete: {reason}") from error
    for name, array in wanted.items():
        if restored[name].shape != array.shape:
            found = f"{'/'.join(name)} has shape {restored[name].shape}"
            raise CheckpointError(f"{directory}: {found}, expected {array.shape}")
    states = {
        field: nnx.from_flat_state(
            [(path, leaf.replace(restored[(*branch, *map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
        )
        for field, branch in _BRANCHES.items()
        for state in [getattr(abstract, field)]
    }
    return abstract.replace(**states)
