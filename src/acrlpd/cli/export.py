"""`acrlpd export`: makes a directory that openpi and acrlpd serve."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Ge

from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import Flag
from acrlpd.text import parse_arguments, print

if TYPE_CHECKING:
    from acrlpd.serving.export import Verification


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Export a policy to a directory that openpi and acrlpd serve."""

    # A run directory (its newest checkpoint is taken) or one of its checkpoints.
    checkpoint: tyro.conf.Positional[Path]
    # Directory to make.
    output: Path
    # "jax": openpi's own layout, and critics. "pytorch": model.safetensors for openpi's PyTorch server and lerobot.
    format: Literal["jax", "pytorch"] = "jax"
    # Cost of an action chunk: denoising steps, candidates and critics.
    level: Literal["fast", "standard", "accurate"] = "standard"
    # Add LoRA adapters into the weights; with --format pytorch this is always done.
    merge_lora: Flag = False
    # Precision of the stored parameters; default: as they were trained.
    dtype: Literal["bfloat16", "float32"] | None = None
    # Critics to put beside the policy: as many as the level wants (the best on the run's data), all, or none.
    critics: Literal["level", "all", "none"] = "level"
    # Guidance towards good actions, for policies that were trained with labels (recap); 1: the positive label alone.
    guidance: Annotated[float | None, Ge(0)] = None
    # Replace an earlier export.
    overwrite: Flag = False
    # Export without norm statistics; by default missing or changed statistics are refused.
    no_norm_stats: Flag = False


def _export(options: ExportOptions) -> "Verification":
    from acrlpd.serving.export import export_policy
    from acrlpd.serving.export_pytorch import export_for_pytorch

    shared: dict[str, Any] = {name: getattr(options, name) for name in ("dtype", "overwrite", "no_norm_stats")}
    of_critics: dict[str, Any] = {name: getattr(options, name) for name in ("level", "critics", "guidance")}
    if options.format == "jax":
        return export_policy(
            options.checkpoint, options.output, merge_adapters=options.merge_lora, **of_critics, **shared
        )
    for name, value in of_critics.items():
        if value != getattr(ExportOptions, name):
            raise ValueError(f"--format pytorch exports the policy alone, as openpi acts with it: leave --{name} out")
    return export_for_pytorch(options.checkpoint, options.output, **shared)


def main(args: Sequence[str]) -> int:
    options = parse_arguments(ExportOptions, args=args, prog="acrlpd export")
    require_bounds(options, "--")
    from acrlpd.process import setup_logging

    setup_logging()
    verification = _export(options)
    print(f"exported to {options.output}; its README.md says how to serve it")
    print(
        f"verified: actions differ from the training policy's by {verification.mean_difference:.2g} on average and "
        f"{verification.max_difference:.2g} at most (normalised units)"
    )
    return 0
