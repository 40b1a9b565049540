"""Opening any checkpoint: exported directories, runs, checkpoints of runs, and plain openpi checkpoints.

All of them have `params/` and `assets/` as openpi has them. An export adds acrlpd.json and, unless it was made without
critics, `critic/`. A run's checkpoint has `run/` and `critic/`. What the two say about themselves is verified: their
checksums when arrays are read, the SHA-256 of the norm statistics before. A plain openpi checkpoint says nothing.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.checksums import read_checksums, verified
from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.config.tree import from_dict
from acrlpd.data.pipeline.config_norm_stats import norm_stats_dir
from acrlpd.data.pipeline.norm_stats import NormStats, load_norm_stats, require_complete
from acrlpd.data.pipeline.rewards import RewardOrigin
from acrlpd.data.pipeline.tokenizer import LongPrompts
from acrlpd.files import is_whole_number
from acrlpd.hub import fetch, is_hub_address, parse_hub_address
from acrlpd.models.openpi_checkpoint import load_pi0_weights_from_openpi, restore_arrays
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.policies.acting_model import ActingCritics, ActingModel, abstract_model
from acrlpd.policies.levels import trained_level
from acrlpd.policies.policy import Policy, create_policy
from acrlpd.process import enable_compilation_cache
from acrlpd.robots.base import ServingLevel
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    CRITIC,
    EXPORT_FILE,
    PARAMS,
    RUN,
    RUN_FILE,
    CheckpointError,
    load_checkpoint_metadata,
    load_export_metadata,
    verify_assets,
)
from acrlpd.runs.directory import saved_steps

logger = logging.getLogger(__name__)

# What acting needs; the state of the optimizers and weights for PyTorch are not fetched.
_ITEMS = (PARAMS, ASSETS, CRITIC, RUN)

_FOR_PYTORCH = (
    f"is in openpi's PyTorch layout ({WEIGHTS_FILE}), which openpi and lerobot serve. To act with the policy here, "
    "export its run without --format pytorch; to train it on, set weight_loader.path"
)
_WITHOUT = "--no_norm_stats acts without norm statistics: on a robot, unscaled actions can do harm"

Kind = Literal["export", "run", "openpi"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory that holds a policy, before its arrays are read."""

    directory: pathlib.Path
    kind: Kind
    rl_config: RLTrainConfig
    level: ServingLevel
    step: int | None
    has_critics: bool
    # The files of assets/ with their SHA-256, as they were saved; None where nothing was written down (openpi).
    assets: Mapping[str, str] | None = None
    # Where the rewards of the training data came from (`StepRewards.origin`); None where nobody knows.
    reward_origin: RewardOrigin | None = None
    # Whether to act without norm statistics, whatever the directory has.
    no_norm_stats: bool = False
    # Where the directory was fetched from; None for a directory that somebody named.
    hub_address: str | None = None

    @property
    def norm_stats_directory(self) -> pathlib.Path | None:
        """The directory of the norm statistics; None for a policy that acts without norm statistics."""
        assets = self.directory / ASSETS
        if self.no_norm_stats:
            return None
        if self.assets is None:
            files = list(assets.rglob(NORM_STATS_FILE))
        else:  # Whatever happened to the directory since, the policy never acts without the statistics of its record.
            files = [assets / name for name in self.assets if pathlib.PurePath(name).name == NORM_STATS_FILE]
        found = sorted(path.parent for path in files)
        if len(found) <= 1:
            return found[0] if found else None
        asset_id = norm_stats_dir(self.rl_config.data).relative_to(self.rl_config.data.assets_dir)
        if assets / asset_id not in found:
            names = ", ".join(str(path.relative_to(assets)) for path in found)
            raise CheckpointError(f"{assets} has norm statistics of {names}; set data.asset_id to one of them")
        return assets / asset_id

    def load_norm_stats(self) -> dict[str, NormStats] | None:
        """The norm statistics that the policy was trained with, verified.

        None for a policy that was trained without norm statistics (on fake data), and with `no_norm_stats`.
        """
        if self.assets is not None and not self.no_norm_stats:
            verify_assets(self.directory, self.assets, f"Copy the file from another checkpoint of the run. {_WITHOUT}")
        directory = self.norm_stats_directory
        if directory is not None:
            norm_stats = load_norm_stats(directory)
            require_complete(norm_stats, self.rl_config.qchunking.action_dim, directory)
            return norm_stats
        if self.assets is None and not self.no_norm_stats:
            raise CheckpointError(
                f"{self.directory} has no {ASSETS}/<asset_id>/{NORM_STATS_FILE}: the actions could not be turned "
                "into the robot's units. Copy the statistics that the policy was trained with to this place. "
                f"{_WITHOUT}"
            )
        logger.warning("%s acts without norm statistics: states and actions are not scaled", self.directory)
        return None

    def with_guidance(self, guidance: float | None) -> "Checkpoint":
        """This checkpoint, acting with another guidance towards good actions; None: as its config says."""
        if guidance is None:
            return self
        if not self.rl_config.labels_prompts:
            raise CheckpointError(
                f"--guidance needs a policy that was trained with labels in its prompts, as improvement recap does; "
                f"{self.directory} was not. Leave --guidance out"
            )
        changed = apply_config_overrides(self.rl_config, {"improvement.guidance": guidance})
        return dataclasses.replace(self, rl_config=changed)

    def abstract_model(self) -> ActingModel:
        """The model as shapes and dtypes, with critics only if the directory has critics."""
        model = abstract_model(self.rl_config)
        return model if self.has_critics else model.replace(critics=None)

    def load_model(self, *, dtype: str | None = None) -> ActingModel:
        """Reads the arrays to the first device; policy parameters in `dtype`, None: as they were trained.

        The programs of a model that acts take long to compile, so they are kept on disk from here on.
        """
        enable_compilation_cache()
        model = self.abstract_model()
        params = _on_first_device(model.params, dtype)
        if self.kind != "openpi":
            read_checksums(self.directory / PARAMS)  # openpi writes no checksums, but these checkpoints must have them
        params = load_pi0_weights_from_openpi(self.directory, params, missing_regex=None)
        critics = model.critics
        if critics is not None:
            wanted = critic_arrays(_on_first_device(critics), self.rl_config.acrlpd)
            with verified(self.directory / CRITIC):  # reads what critics need to choose, and nothing else
                restored = restore_arrays(self.directory / CRITIC, wanted)
            critics = jax.tree.unflatten(jax.tree.structure(critics), [restored[name] for name in wanted])
        return model.replace(params=params, critics=critics)


def load_policy(checkpoint: Checkpoint, *, best_of_n: int | None = None, long_prompts: LongPrompts = "cut") -> Policy:
    """The policy of a checkpoint, with parameters in the model's compute precision.

    openpi serves every model with bfloat16 parameters; this differs for models that compute in float32 alone.
    Denoising steps, and candidates unless `best_of_n` says otherwise, are those of the checkpoint's level.
    """
    policy = create_policy(  # of shapes, so that an impossible policy is refused before gigabytes are read
        checkpoint.abstract_model(),
        checkpoint.rl_config,
        checkpoint.load_norm_stats(),
        best_of_n=checkpoint.level.best_of_n if best_of_n is None else best_of_n,
        long_prompts=long_prompts,
    )
    model = checkpoint.load_model(dtype=checkpoint.rl_config.model.dtype)
    return dataclasses.replace(
        policy, model=model, num_steps=checkpoint.level.num_steps, reward_origin=checkpoint.reward_origin
    )


def open_checkpoint(
    path: str | pathlib.Path, rl_config: RLTrainConfig | None = None, *, no_norm_stats: bool = False
) -> Checkpoint:
    """Finds out what `path` is. Of a run directory the newest checkpoint is taken.

    `path` is a directory or the address of a repository of the hub, such as hf://owner/name@tag, which is fetched.
    `rl_config` describes a plain openpi checkpoint, which does not say for which model and robot it is. Everything else
    has a config of its own. With `no_norm_stats` the policy acts without norm statistics.
    """
    if is_hub_address(path):
        address = parse_hub_address(path)
        known = (EXPORT_FILE, f"{RUN}/{RUN_FILE}", f"{PARAMS}/_METADATA")
        fetched = fetch(address, one_of=known, patterns=[f"{item}/*" for item in _ITEMS] + ["*.json"])
        opened = open_checkpoint(fetched, rl_config, no_norm_stats=no_norm_stats)
        return dataclasses.replace(opened, hub_address=str(address))
    directory = pathlib.Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory: expected an export, a run or a checkpoint, on this machine"
        )
    if (directory / WEIGHTS_FILE).is_file() and not (directory / PARAMS).is_dir():
        raise CheckpointError(f"{directory} {_FOR_PYTORCH}")
    if (directory / EXPORT_FILE).is_file():
        return _open_described(directory, "export", no_norm_stats)
    if (directory / RUN / RUN_FILE).is_file():
        return _open_described(directory, "run", no_norm_stats)
    if (directory / PARAMS / "_METADATA").is_file():
        if rl_config is None:
            raise CheckpointError(
                f"{directory} is a checkpoint of openpi, which does not say for which model and robot it is. To serve "
                "or evaluate it, name its config, for example --config aloha; there is nothing to export"
            )
        level = ServingLevel(rl_config.acrlpd.sampling_steps, best_of_n=1, num_critics=0)
        step = int(directory.name) if is_whole_number(directory.name) else None
        return Checkpoint(directory, "openpi", rl_config, level, step, has_critics=False, no_norm_stats=no_norm_stats)
    steps = saved_steps(directory)
    if not steps:
        raise CheckpointError(
            f"{directory} is neither an exported directory ({EXPORT_FILE}), nor a run (numbered checkpoints), nor "
            f"a checkpoint of acrlpd ({RUN}/{RUN_FILE}) or openpi ({PARAMS}/_METADATA)"
        )
    return open_checkpoint(directory / str(steps[-1]), rl_config, no_norm_stats=no_norm_stats)


def open_checkpoints(
    paths: Sequence[pathlib.Path], rl_config: RLTrainConfig | None = None, *, no_norm_stats: bool = False
) -> list[Checkpoint]:
    """Opens all checkpoints; a checkpoint that is named twice is opened once."""
    checkpoints = [open_checkpoint(path, rl_config, no_norm_stats=no_norm_stats) for path in paths]
    opened = {checkpoint.directory: checkpoint for checkpoint in checkpoints}
    if rl_config is not None and all(checkpoint.kind != "openpi" for checkpoint in opened.values()):
        raise CheckpointError(f"--config is for checkpoints of openpi; found none among {', '.join(map(str, paths))}")
    return list(opened.values())


def _open_described(directory: pathlib.Path, kind: Kind, no_norm_stats: bool) -> Checkpoint:
    """An export, or a checkpoint of a run: both say what the directory holds."""
    content = load_export_metadata(directory) if kind == "export" else load_checkpoint_metadata(directory)
    if content.get("layout") == "pytorch":
        raise CheckpointError(f"{directory} {_FOR_PYTORCH}")
    rl_config = from_dict(RLTrainConfig, content["config"])
    rl_config = dataclasses.replace(rl_config, model=rl_config.model.with_assets(directory / ASSETS))
    try:
        if kind == "export":
            level, has_critics = ServingLevel(**content["serving"]), content["critics"] is not None
        else:  # cloning alone leaves the critics as they were initialised, so they must not choose
            level, has_critics = trained_level(rl_config), rl_config.acrlpd.loss_weights.critic_weight > 0
        name = content.get("reward_origin")
        origin = None if name is None else RewardOrigin[name]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory} is damaged or of another version: {type(error).__name__}: {error}"
        ) from error
    if not has_critics:
        level = dataclasses.replace(level, best_of_n=1, num_critics=0)
    return Checkpoint(
        directory, kind, rl_config, level, content["step"], has_critics, content["assets"], origin, no_norm_stats
    )


def critic_branches(hyperparams: ACRLPDHyperparams) -> dict[str, tuple[str, ...]]:
    """Fields of `ActingCritics` -> their branches within `critic/`, which are named as the fields of the agent."""
    return {
        "online": ("critics", "online" if hyperparams.critic_ema_decay is None else "average"),
        "temperature": ("temperature_params",),
        "improvement": ("improvement", "params"),
    }


def critic_arrays(critics: ActingCritics, hyperparams: ACRLPDHyperparams) -> dict[tuple[str, ...], Any]:
    """The leaves of the critics, in their order, by their paths within `critic/`."""
    arrays, branches = {}, critic_branches(hyperparams)
    for path, leaf in jax.tree_util.tree_flatten_with_path(critics)[0]:
        field, *names, _ = (jax.tree_util.keystr((key,), simple=True) for key in path)  # the last key is "value"
        arrays[(*branches[field], *names)] = leaf
    return arrays


def _on_first_device(tree: Any, dtype: str | None = None) -> Any:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place), tree)
