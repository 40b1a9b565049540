"""`acrlpd eval`: judges checkpoints of any kind in their environment, all with the same seeds."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from annotated_types import Ge

from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import Flag, find_config
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.text import parse_arguments, print

if TYPE_CHECKING:
    from acrlpd.evaluation.protocol import Evaluation
    from acrlpd.policies.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Evaluate checkpoints in simulation; every policy gets the same seeds.

    An option that is not given is as in the checkpoint's config.
    """

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
    # Guidance towards good actions, for policies that were trained with labels (recap); 1: the positive label alone.
    guidance: Annotated[float | None, Ge(0)] = None
    # How chunks become steps: open_loop, or module:Name of your own execution.
    execution: str | None = None
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
    # Act without norm statistics; by default missing or changed statistics are refused.
    no_norm_stats: Flag = False
    # Print JSON instead of tables.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    options = parse_arguments(EvalOptions, args=args, prog="acrlpd eval")
    _check(options)
    import json

    from acrlpd.evaluation.protocol import write_evaluations
    from acrlpd.evaluation.report import print_evaluations
    from acrlpd.policies.checkpoint import open_checkpoints
    from acrlpd.process import setup_logging

    setup_logging()
    config = None if options.config is None else find_config(options.config)
    opened = open_checkpoints(options.checkpoints, config, no_norm_stats=options.no_norm_stats)
    checkpoints = [checkpoint.with_guidance(options.guidance) for checkpoint in opened]
    # Run and step name a checkpoint in the table; the whole path does where run and step are not unique.
    short = [c.hub_address or f"{c.directory.parent.name} {c.directory.name}" for c in checkpoints]
    named: dict[str, Evaluation] = {}
    for checkpoint, label in zip(checkpoints, short, strict=True):
        named |= _evaluate(checkpoint, label if short.count(label) == 1 else str(checkpoint.directory), options)
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
    require_bounds(options, "--")
    if options.videos and options.output is None:
        raise ValueError("--videos needs --output, the directory to write them to")
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output must be a directory; {options.output} is a file")


def _evaluate(checkpoint: "Checkpoint", label: str, options: EvalOptions) -> "dict[str, Evaluation]":
    """One checkpoint in all environments, by names for the table."""
    from acrlpd.evaluation.protocol import EvaluationProtocol
    from acrlpd.policies.checkpoint import load_policy

    policy, named = load_policy(checkpoint, best_of_n=options.best_of_n), {}
    for env in dict.fromkeys(options.env) or (None,):
        changes = {
            "env.id": env,
            "env.num_envs": options.num_envs,
            "env.execution": options.execution,
            "env.replan_steps": options.replan_steps,
            "evaluation.num_episodes": options.episodes,
            "evaluation.seed": options.seed,
            "evaluation.num_videos": options.videos,
        }
        given = {key: value for key, value in changes.items() if value is not None}
        config = apply_config_overrides(checkpoint.rl_config, given)
        name = label if env is None else f"{label} in {env}"
        output = options.output and options.output / name.replace("/", "_").replace(" ", "-")
        with EvaluationProtocol(
            config, policy.norm_stats, reward_origin=policy.reward_origin, num_workers=options.num_workers
        ) as evaluator:
            logger.info("%s: %d episodes, after the policy is compiled", name, config.evaluation.num_episodes)
            named[name] = evaluator.evaluate(policy, robustness=options.robustness, directory=output)
    return named
