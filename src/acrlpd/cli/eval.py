"""`acrlpd eval`: judges checkpoints in their environment, all with the same seeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from acrlpd.config.command_line import Flag

if TYPE_CHECKING:
    from acrlpd.config import RLTrainConfig
    from acrlpd.evaluation.protocol import Evaluation


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to evaluate, and how; where nothing is said, as in the checkpoint's config."""

    # Run directories (the newest checkpoint counts) or single checkpoints.
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    # Environments; several give a table each.
    env: tuple[str, ...] = ()
    # Episodes per policy and environment.
    episodes: int | None = None
    # Seed of the first episode.
    seed: int | None = None
    # Candidates per chunk.
    best_of_n: int | None = None
    # Steps of a chunk that are executed before the policy is asked again.
    replan_steps: int | None = None
    # Environments in parallel.
    num_envs: int | None = None
    # Processes that they live in; 0: this one. Default: one per core.
    num_workers: int | None = None
    # Also measure noise on observations and actions, and other numbers of candidates.
    robustness: Flag = False
    # Episodes to film.
    videos: int = 0
    # Directory for evaluation.json and videos.
    output: Path | None = None
    # Print JSON instead of tables.
    json: Flag = False


_LEAST = {
    "episodes": 1,
    "seed": 0,
    "best_of_n": 1,
    "replan_steps": 1,
    "num_envs": 1,
    "num_workers": 0,
    "videos": 0,
}


def main(args: Sequence[str]) -> int:
    options = tyro.cli(
        EvalOptions,
        args=args,
        prog="acrlpd eval",
        description="Evaluate checkpoints in simulation; every policy gets the same seeds.",
    )
    if not options.checkpoints:
        raise ValueError("nothing to evaluate: give a run directory, or one of its checkpoints")
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}; found {value}")
    if options.videos and options.output is None:
        raise ValueError("--videos needs --output, the directory to write them to")
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output must be a directory; {options.output} is a file")
    from acrlpd.evaluation.report import print_evaluations, write_json
    from acrlpd.process import setup_logging
    from acrlpd.training.checkpoints.manager import newest_step_directory

    setup_logging()
    found = [newest_step_directory(path.expanduser().absolute()) for path in options.checkpoints]
    directories = list(dict.fromkeys(found))  # what is named twice is judged once
    named: dict[str, Evaluation] = {}
    for directory, label in zip(directories, labels(directories), strict=True):
        named |= _evaluate(directory, label, options)
    content = {name: evaluation.to_json() for name, evaluation in named.items()}
    if options.output is not None:
        write_json(options.output / "evaluation.json", content)
    if options.json:
        import json

        print(json.dumps(content, indent=2))
    else:
        print_evaluations(named)
    return 0


def labels(directories: Sequence[Path]) -> list[str]:
    """Names of checkpoints for the table: run and step, or the whole path where these are not enough."""
    short = [f"{directory.parent.name} {directory.name}" for directory in directories]
    return [
        name if short.count(name) == 1 else str(directory) for name, directory in zip(short, directories, strict=True)
    ]


def _evaluate(directory: Path, label: str, options: EvalOptions) -> "dict[str, Evaluation]":
    """One checkpoint in all environments, by names for the table."""
    from acrlpd.config import RLTrainConfig
    from acrlpd.config.tree import from_dict
    from acrlpd.data.pipeline.norm_stats import load_norm_stats
    from acrlpd.data.pipeline.rewards import RewardOrigin
    from acrlpd.evaluation.protocol import EvaluationProtocol
    from acrlpd.training.checkpoints.manager import load_checkpoint_agent
    from acrlpd.training.checkpoints.metadata import load_checkpoint_metadata

    metadata = load_checkpoint_metadata(directory)
    saved = from_dict(RLTrainConfig, metadata["config"])
    agent, _ = load_checkpoint_agent(directory, saved)
    stats_files = list((directory / "assets").rglob("norm_stats.json"))
    norm_stats = load_norm_stats(stats_files[0].parent) if stats_files else None
    named = {}
    for env in dict.fromkeys(options.env) or (None,):
        config = apply_options(saved, env, options)
        name = label if env is None else f"{label} in {env}"
        output = None
        if options.output is not None:
            output = options.output / name.replace("/", "_").replace(" ", "-")
        with EvaluationProtocol(
            config,
            norm_stats,
            reward_origin=RewardOrigin[metadata["reward_origin"]] if "reward_origin" in metadata else None,
            num_workers=options.num_workers,
        ) as evaluator:
            named[name] = evaluator.evaluate(agent, robustness=options.robustness, directory=output)
    return named


def apply_options(config: "RLTrainConfig", env: str | None, options: EvalOptions) -> "RLTrainConfig":
    """The checkpoint's config with what the command line says."""
    from acrlpd.config import apply_config_overrides

    changes: dict[str, Any] = {
        "env.id": env,
        "env.num_envs": options.num_envs,
        "env.replan_steps": options.replan_steps,
        "evaluation.num_episodes": options.episodes,
        "evaluation.seed": options.seed,
        "evaluation.best_of_n": options.best_of_n,
        "evaluation.num_videos": options.videos,
    }
    return apply_config_overrides(config, {key: value for key, value in changes.items() if value is not None})
