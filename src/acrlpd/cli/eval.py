"""`acrlpd eval`: judges checkpoints of any kind in their environment, all with the same seeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge

from acrlpd.config.bounds import check_bounds
from acrlpd.config.command_line import Flag

if TYPE_CHECKING:
    from acrlpd.config import RLTrainConfig
    from acrlpd.evaluation.protocol import Evaluation
    from acrlpd.policies.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to evaluate, and how. An option that is not given is as in the checkpoint's config."""

    # Runs (their newest checkpoints are taken), checkpoints of runs, exports, or openpi checkpoints (with --config).
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    # Preset or YAML file that describes the openpi checkpoints.
    config: str | None = None
    # Environments; each has a row of its own in the table.
    env: tuple[str, ...] = ()
    # Episodes per policy and environment.
    episodes: Annotated[int | None, Ge(1)] = None
    # Seed of the first episode.
    seed: Annotated[int | None, Ge(0)] = None
    # Candidates per chunk; default: those that the checkpoint is served with.
    best_of_n: Annotated[int | None, Ge(1)] = None
    # Steps of a chunk that are executed before the policy is asked again.
    replan_steps: Annotated[int | None, Ge(1)] = None
    # Environments in parallel.
    num_envs: Annotated[int | None, Ge(1)] = None
    # Processes of the environments; 0: this process. Default: one per core.
    num_workers: Annotated[int | None, Ge(0)] = None
    # Also evaluate with noise on observations and actions, and with other numbers of candidates.
    robustness: Flag = False
    # Episodes to film.
    videos: Annotated[int, Ge(0)] = 0
    # Directory for evaluation.json and videos.
    output: Path | None = None
    # Print JSON instead of tables.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    options = tyro.cli(
        EvalOptions,
        args=args,
        prog="acrlpd eval",
        description="Evaluate checkpoints in simulation; every policy gets the same seeds.",
    )
    _check(options)
    import json

    from acrlpd.evaluation.protocol import write_evaluations
    from acrlpd.evaluation.report import print_evaluations
    from acrlpd.process import setup_logging

    setup_logging()
    checkpoints = open_checkpoints(options.checkpoints, options.config)
    named: dict[str, Evaluation] = {}
    for checkpoint, label in zip(checkpoints, labels([c.directory for c in checkpoints]), strict=True):
        named |= _evaluate(checkpoint, label, options)
    content = {name: evaluation.to_json() for name, evaluation in named.items()}
    if options.output is not None:
        write_evaluations(options.output, content)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        print_evaluations(named)
    return 0


def _check(options: EvalOptions) -> None:
    """Refuses options that cannot be, before anything is imported or read."""
    if not options.checkpoints:
        raise ValueError("nothing to evaluate: give a run directory, one of its checkpoints, or an export")
    for finding in check_bounds(options, "--"):
        raise ValueError(finding.message)
    if options.videos and options.output is None:
        raise ValueError("--videos needs --output, the directory to write them to")
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output must be a directory; {options.output} is a file")


def open_checkpoints(paths: Sequence[Path], config: str | None) -> "list[Checkpoint]":
    """Opens all checkpoints; a checkpoint that is named twice is opened once. `config` is for those of openpi."""
    from acrlpd.config.command_line import find_config
    from acrlpd.policies.checkpoint import needs_config, open_checkpoint

    rl_config = None if config is None else find_config(config)
    if rl_config is not None and not any(map(needs_config, paths)):
        raise ValueError(f"--config is for checkpoints of openpi; found none among {', '.join(map(str, paths))}")
    opened = [open_checkpoint(path, rl_config if needs_config(path) else None) for path in paths]
    return list({checkpoint.directory: checkpoint for checkpoint in opened}.values())


def labels(directories: Sequence[Path]) -> list[str]:
    """Names of checkpoints for the table: run and step, or the whole path where run and step are not unique."""
    short = [f"{directory.parent.name} {directory.name}" for directory in directories]
    return [
        name if short.count(name) == 1 else str(directory) for name, directory in zip(short, directories, strict=True)
    ]


def _evaluate(checkpoint: "Checkpoint", label: str, options: EvalOptions) -> "dict[str, Evaluation]":
    """One checkpoint in all environments, by names for the table."""
    from acrlpd.evaluation.protocol import EvaluationProtocol
    from acrlpd.policies.checkpoint import load_policy

    policy, norm_stats = load_policy(checkpoint, best_of_n=options.best_of_n), checkpoint.load_norm_stats()
    named = {}
    for env in dict.fromkeys(options.env) or (None,):
        config = apply_options(checkpoint.rl_config, env, options)
        name = label if env is None else f"{label} in {env}"
        output = None
        if options.output is not None:
            output = options.output / name.replace("/", "_").replace(" ", "-")
        with EvaluationProtocol(
            config, norm_stats, reward_origin=checkpoint.reward_origin, num_workers=options.num_workers
        ) as evaluator:
            named[name] = evaluator.evaluate(policy, robustness=options.robustness, directory=output)
    return named


def apply_options(config: "RLTrainConfig", env: str | None, options: EvalOptions) -> "RLTrainConfig":
    """The checkpoint's config with the options of the command line."""
    from acrlpd.config import apply_config_overrides

    changes: dict[str, Any] = {
        "env.id": env,
        "env.num_envs": options.num_envs,
        "env.replan_steps": options.replan_steps,
        "evaluation.num_episodes": options.episodes,
        "evaluation.seed": options.seed,
        "evaluation.num_videos": options.videos,
    }
    return apply_config_overrides(config, {key: value for key, value in changes.items() if value is not None})
