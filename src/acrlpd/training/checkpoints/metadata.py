"""What a checkpoint says about its run, and whether a config may continue the run."""

import datetime
import importlib.metadata
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.config import ConfigError, RLTrainConfig, config_hash, diff_configs, to_dict
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.config.tree import describe_changes, flatten, from_dict
from acrlpd.data.pipeline.config_norm_stats import norm_stats_dir
from acrlpd.data.pipeline.norm_stats import ORIGIN_FILE
from acrlpd.runs.checkpoint_layout import (
    FORMAT,
    FORMER_VALUES,
    describe_assets,
    load_checkpoint_metadata,
    verify_assets,
)

# Fields and sections that may differ between save and resume: they decide where things lie, how fast the run is and
# what is shown. Placement and micro-batches change results by rounding only.
FREE_TO_CHANGE = (
    "exp_name",
    "checkpoints",
    "logging",
    "fsdp",
    "openpi_compatibility.config_name",
    "openpi_compatibility.reset_pose",
    "training.gradient_accumulation_steps",
    "training.log_frequency",
    "training.save_frequency",
    "training.updates_per_call",
    "data.num_workers",
    "data.on_device",
    "data.prefetch_batches",
    "acrlpd.best_of_n.strategy",
    "acrlpd.best_of_n.chunk_size",
    "acrlpd.best_of_n.memory_limit_mib",
    "model.remat_policy",
)

# What a run.json must hold to be resumed from, beside what every run.json holds.
RESUMED_STATE: dict[str, type | tuple[type, ...]] = {
    "data": dict,
    "metrics": dict,
    "monitor": (dict, type(None)),
    "evaluation": dict,
    "phase": str,
    "online_start": (int, type(None)),
    "online": (dict, type(None)),
    "wall_time_s": (int, float),
}

# The numbers of the held-out episodes in a run.json; null for a branch whose data has changed.
HELD_OUT = "held_out"
# Fields that decide which episodes a run has.
EPISODE_FIELDS = ("data.data_dir", "data.repo_id", "data.max_episodes", "data.validation_share")

Changes = dict[str, tuple[Any, Any]]  # dotted name -> (in the checkpoint, now)


def create_checkpoint_metadata(
    rl_config: RLTrainConfig, step: int, *, average: bool, assets: Mapping[str, bytes]
) -> dict[str, Any]:
    """The content of run.json, without the random key and the state that the trainer adds (cursor, metrics, time)."""
    return {
        "format": FORMAT,
        "step": step,
        "config": to_dict(rl_config),
        "config_hash": config_hash(rl_config),
        "params_hold_average": average,
        "assets": describe_assets(assets),
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in ("acrlpd", "jax", "flax", "orbax-checkpoint")},
        "devices": jax.device_count(),
    }


def describe_rng(rng: jax.Array) -> dict[str, Any]:
    """A random key as run.json holds it."""
    return {"impl": str(jax.random.key_impl(rng)), "data": np.asarray(jax.random.key_data(rng)).tolist()}


def restore_rng(metadata: Mapping[str, Any]) -> jax.Array:
    """The random key of a run."""
    data = jnp.asarray(metadata["rng"]["data"], jnp.uint32)
    return jax.random.wrap_key_data(data, impl=metadata["rng"]["impl"])


def check_resume(
    step_directory: pathlib.Path,
    rl_config: RLTrainConfig,
    assets: Mapping[str, bytes],
    allow_changed: Iterable[str] = (),
) -> Changes:
    """Refuses a config or norm statistics with which the run would become another run; returns the allowed changes.

    `allow_changed` holds dotted names of fields or of sections that may differ.
    """
    metadata, allowed = load_checkpoint_metadata(step_directory), tuple(allow_changed)
    saved = from_dict(RLTrainConfig, metadata["config"])
    fields = {name for config in (saved, rl_config) for name, _ in flatten(to_dict(config))}
    if unknown := [name for name in allowed if not any(_is_within(field, name) for field in fields)]:
        raise ConfigError(f"--allow_changed names what is no field of the config: {', '.join(unknown)}")
    changes = diff_configs(saved, rl_config)
    refused = [name for name in changes if not any(_is_within(name, other) for other in (*FREE_TO_CHANGE, *allowed))]
    if refused:
        older = "".join(
            f"\nA run that is older than the field {name} continues with --{name} {FORMER_VALUES[name]}"
            for name in refused
            if name in FORMER_VALUES
        )
        raise ConfigError(
            f"the config differs from that of {step_directory}:\n"
            f"{describe_changes({name: changes[name] for name in refused})}\n"
            f"Resume with the config of the run (its config.yaml), or allow the changes by name: "
            f"--allow_changed {' '.join(refused)}{older}"
        )
    check_assets(step_directory, metadata["assets"], assets)
    return changes


def read_assets(rl_config: RLTrainConfig) -> dict[str, bytes]:
    """What a policy needs beside its weights as files for a checkpoint, by their path below assets/.

    These are the norm statistics, which fake data does not have, and the files of the policy family.
    """
    directory = norm_stats_dir(rl_config.data)
    asset_id = directory.relative_to(rl_config.data.assets_dir).as_posix()
    names = (NORM_STATS_FILE, ORIGIN_FILE)
    found = {f"{asset_id}/{name}": (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    return found | rl_config.model.asset_files()


def check_assets(step_directory: pathlib.Path, recorded: Mapping[str, str], assets: Mapping[str, bytes]) -> None:
    """Refuses norm statistics that are not those of the checkpoint, whose assets are `recorded` in it."""
    verify_assets(step_directory, recorded, "Copy the file from another checkpoint of the run")
    now = describe_assets(assets)
    for name in sorted({*recorded, *now}):
        if recorded.get(name) == now.get(name) or name.endswith(ORIGIN_FILE):
            continue
        is_scale = name.endswith(NORM_STATS_FILE)
        change = "see differently scaled data" if is_scale else "read and write other actions"
        raise ConfigError(
            f"{name} is not what {step_directory} was trained with: the policy would {change}. Restore it from "
            f"{step_directory}/assets/{name}"
        )


def kept_episodes(step_directory: pathlib.Path, changes: Changes) -> frozenset[int] | None:
    """The held-out episodes of a run that goes on at a checkpoint; None if changes of its config want other ones."""
    episodes = load_checkpoint_metadata(step_directory).get(HELD_OUT)
    is_other_data = any(name in changes for name in EPISODE_FIELDS)
    return None if episodes is None or is_other_data else frozenset(episodes)


def _is_within(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")
