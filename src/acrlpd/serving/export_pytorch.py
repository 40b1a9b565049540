"""A directory that openpi's PyTorch server and lerobot read: the policy alone, with its adapters merged."""

import dataclasses
import json
import pathlib

import jax
from flax import nnx

from acrlpd.checksums import write_checksums
from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig, to_dict
from acrlpd.models.lora import has_adapters
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE, load_pytorch_weights, save_pytorch_weights
from acrlpd.models.paligemma_sizes import DType
from acrlpd.policies.acting_model import ActingModel, abstract_model
from acrlpd.policies.checkpoint import Checkpoint
from acrlpd.runs.checkpoint_layout import EXPORT_FILE, CheckpointError
from acrlpd.serving.export import (
    Verification,
    compare_actions,
    convert_policy,
    describe_export,
    exported_directory,
    open_trained,
    refuse_other_actions,
    refuse_to_lose_networks,
)
from acrlpd.serving.export_readme import write_pytorch_readme

CONFIG_FILE = "config.json"  # of openpi's converter; neither openpi nor acrlpd reads it

_FIELDS = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")


def export_for_pytorch(
    source: str | pathlib.Path,
    output: str | pathlib.Path,
    *,
    dtype: DType | None = None,
    overwrite: bool = False,
    no_norm_stats: bool = False,
) -> Verification:
    """Exports the policy of a run (its newest checkpoint) or of one checkpoint, and compares it with the source.

    The file is read back for the comparison. `dtype` None keeps every parameter as it was trained; weights into which
    adapters were merged are float32.
    """
    checkpoint = dataclasses.replace(open_trained(source, no_norm_stats=no_norm_stats), has_critics=False)
    rl_config = checkpoint.rl_config
    if not rl_config.model.in_openpi_pytorch:
        raise CheckpointError(
            f"openpi's PyTorch models are pi0 and pi0.5; this run trained a {kind_name(rl_config.model)} policy. "
            "Export it without --format pytorch"
        )
    refuse_to_lose_networks(rl_config, "export without --format pytorch")
    with exported_directory(output, overwrite=overwrite) as directory:
        exported = _write(checkpoint, directory, dtype)
        verification = compare_actions(
            checkpoint, lambda: _load_model(directory, exported, dtype), dtype, critics=False
        )
        refuse_other_actions(verification)
    return verification


def _write(checkpoint: Checkpoint, directory: pathlib.Path, dtype: DType | None) -> RLTrainConfig:
    """Writes everything, and returns the config of the policy without adapters."""
    params = checkpoint.load_model().params
    merged_adapters = has_adapters(params)
    rl_config, params = convert_policy(checkpoint.rl_config, params, merge_adapters=merged_adapters, dtype=dtype)
    save_pytorch_weights(params, directory / WEIGHTS_FILE)
    fields = to_dict(rl_config.model)
    config = {name: fields[name] for name in _FIELDS} | {"precision": dtype or "float32"}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    content = {
        "layout": "pytorch",
        "serving": dataclasses.asdict(dataclasses.replace(checkpoint.level, best_of_n=1, num_critics=0)),
        "critics": None,
        "params_dtype": dtype or "as trained",
        "config": to_dict(rl_config),
    }
    describe_export(checkpoint, directory, content)
    write_checksums(directory, [directory / name for name in (EXPORT_FILE, WEIGHTS_FILE, CONFIG_FILE)])
    exported = dataclasses.replace(checkpoint, rl_config=rl_config)
    write_pytorch_readme(directory, exported, merged_adapters=merged_adapters)
    return rl_config


def _load_model(directory: pathlib.Path, rl_config: RLTrainConfig, dtype: DType | None) -> ActingModel:
    model = abstract_model(rl_config).replace(critics=None)
    shapes: nnx.State = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), model.params)
    return model.replace(params=load_pytorch_weights(directory / WEIGHTS_FILE, shapes, missing_regex=None))
