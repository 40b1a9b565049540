"""What a checkpoint says about its run, and whether a config may continue it."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from acrlpd.config import ConfigError, RLTrainConfig, config_hash, to_dict
from acrlpd.config.tree import flatten, from_dict
from acrlpd.training.checkpoints.items import RUN, RUN_FILE

FORMAT = 1
# May differ between save and resume without a word: where things lie, how fast, and what is shown.
# Placement and micro-batches change results by rounding only.
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
    "data.num_workers",
    "data.prefetch_batches",
    "acrlpd.best_of_n.strategy",
    "acrlpd.best_of_n.chunk_size",
    "acrlpd.best_of_n.memory_limit_mib",
    "model.remat_policy",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def create_checkpoint_metadata(
    rl_config: RLTrainConfig,
    step: int,
    *,
    rng: jax.Array,
    served: str,
    assets: Mapping[str, bytes],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of run.json; `state` is what the trainer adds (cursor, metrics, time)."""
    return {
        "format": FORMAT,
        "step": step,
        "config": to_dict(rl_config),
        "config_hash": config_hash(rl_config),
        "served": served,
        "rng": {"impl": str(jax.random.key_impl(rng)), "data": np.asarray(jax.random.key_data(rng)).tolist()},
        "assets": {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()},
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in ("acrlpd", "jax", "flax", "orbax-checkpoint")},
        "devices": jax.device_count(),
        **state,
    }


def load_checkpoint_metadata(step_directory: epath.PathLike) -> dict[str, Any]:
    path = epath.Path(step_directory) / RUN / RUN_FILE
    if not path.exists():
        raise CheckpointError(f"{step_directory} is not a checkpoint of a run: it has no {RUN}/{RUN_FILE}")
    try:
        metadata = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{step_directory} was written in format {metadata['format']} by acrlpd "
            f"{metadata['versions']['acrlpd']}; this version reads format {FORMAT}"
        )
    return metadata


def restore_rng(metadata: Mapping[str, Any]) -> jax.Array:
    """The random key of a run."""
    data = jnp.asarray(metadata["rng"]["data"], jnp.uint32)
    return jax.random.wrap_key_data(data, impl=metadata["rng"]["impl"])


@dataclasses.dataclass(frozen=True)
class Compatibility:
    """How a config differs from that of a checkpoint; true when the run may go on."""

    changed: dict[str, tuple[Any, Any]]  # dotted name -> (in the checkpoint, now)
    refused: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.refused

    def describe(self, names: Iterable[str]) -> str:
        lines = (f"  {name}: {self.changed[name][0]!r} -> {self.changed[name][1]!r}" for name in names)
        return "\n".join(lines)


def validate_checkpoint_compatibility(
    step_directory: epath.PathLike, rl_config: RLTrainConfig, allow_changed: Iterable[str] = ()
) -> Compatibility:
    """Compares the config of a checkpoint with the one that is to continue it.

    `allow_changed` holds dotted names of fields or of sections that may differ.
    """
    metadata = load_checkpoint_metadata(step_directory)
    # A field that the checkpoint is older than had its default's meaning.
    complete = to_dict(from_dict(RLTrainConfig, metadata["config"]))
    old, new = dict(flatten(complete)), dict(flatten(to_dict(rl_config)))
    allowed = tuple(allow_changed)
    unknown = [name for name in allowed if not any(_within(field, name) for field in (*new, *old))]
    if unknown:
        raise ConfigError(f"--allow_changed names what is no field of the config: {', '.join(unknown)}")
    if metadata["config_hash"] == config_hash(rl_config):
        return Compatibility({}, ())
    names = [*old, *(name for name in new if name not in old)]
    changed = {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
    refused = (name for name in changed if not any(_within(name, a) for a in (*FREE_TO_CHANGE, *allowed)))
    return Compatibility(changed, tuple(refused))


def _within(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def check_resume(
    step_directory: epath.PathLike,
    rl_config: RLTrainConfig,
    assets: Mapping[str, bytes],
    allow_changed: Iterable[str] = (),
) -> Compatibility:
    """Refuses to continue a run as something else than it was."""
    compatibility = validate_checkpoint_compatibility(step_directory, rl_config, allow_changed)
    if not compatibility:
        refused = compatibility.refused
        raise ConfigError(
            f"the config differs from that of {step_directory}:\n{compatibility.describe(refused)}\n"
            f"Resume with the config of the run (its config.yaml), or allow the changes by name: "
            f"--allow_changed {' '.join(refused)}"
        )
    saved = load_checkpoint_metadata(step_directory)["assets"]
    for name, content in assets.items():
        if name.endswith("norm_stats.json") and saved.get(name) != hashlib.sha256(content).hexdigest():
            raise ConfigError(
                f"{name} is not what {step_directory} was trained with: the policy would see differently "
                f"scaled data. Restore it from {step_directory}/assets/{name}"
            )
    return compatibility
