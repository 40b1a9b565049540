"""`acrlpd export`: makes a directory that openpi and acrlpd serve."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge

from acrlpd.config.bounds import check_bounds
from acrlpd.config.command_line import Flag
from acrlpd.text import parse_arguments, print


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Export a policy to a directory that openpi and acrlpd serve."""

    # A run directory (its newest checkpoint is taken) or one of its checkpoints.
    checkpoint: tyro.conf.Positional[Path]
    # Directory to make.
    output: Path
    # Cost of an action chunk: denoising steps, candidates and critics.
    level: Literal["fast", "standard", "accurate"] = "standard"
    # Add LoRA adapters into the weights.
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


def main(args: Sequence[str]) -> int:
    options = parse_arguments(ExportOptions, args=args, prog="acrlpd export")
    for finding in check_bounds(options, "--"):
        raise ValueError(finding.message)
    from acrlpd.process import setup_logging
    from acrlpd.serving.export import export_policy

    setup_logging()
    verification = export_policy(
        options.checkpoint,
        options.output,
        level=options.level,
        merge_adapters=options.merge_lora,
        dtype=options.dtype,
        critics=options.critics,
        guidance=options.guidance,
        overwrite=options.overwrite,
        no_norm_stats=options.no_norm_stats,
    )
    print(f"exported to {options.output}; its README.md says how to serve it")
    print(
        f"verified: actions differ from the training policy's by {verification.mean_difference:.2g} on average and "
        f"{verification.max_difference:.2g} at most (normalised units)"
    )
    return 0
