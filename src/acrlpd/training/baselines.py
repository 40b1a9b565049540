"""The baselines of a run (`evaluation.baselines`), and the table that compares them with the run.

The baselines have the data, seeds and number of updates of the run, without RL or without acting.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import rich.table

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.console import Console
from acrlpd.data.pipeline.dataset_checks import check_outcomes
from acrlpd.data.pipeline.outcomes import OutcomeError
from acrlpd.envs.create import EnvPools
from acrlpd.runs import directory as runs
from acrlpd.runs.record import BASELINES, STAGES
from acrlpd.training.checkpoints.metadata import check_resume, read_assets
from acrlpd.training.options import RunOptions
from acrlpd.training.train_runs import train_runs
from acrlpd.units import format_interval, format_percent

logger = logging.getLogger(__name__)

OFFLINE_SUCCESS = "offline_success"
OFFLINE_CONTINUED = "offline_continued"
# `qchunking.success_ratio` of `offline_success`, unless the run has a share of its own. Without a share, few successes
# in the data mean few windows for the policy in each batch.
_SUCCESS_RATIO = 0.5
# Sections in which the config of `offline_continued` differs from the checkpoint of the run that it continues.
_CHANGED_BY_CONTINUED = ("training", "evaluation")


def run_comparison(configs: Sequence[RLTrainConfig], directories: Sequence[pathlib.Path], options: RunOptions) -> int:
    """Trains runs and their baselines, each in its own directory, and compares them; returns the exit code.

    The other baselines come first. `offline_continued` comes last: it starts from the checkpoint with
    which a run went online. What is finished is not trained again.
    """
    if jax.process_count() > 1:
        raise ConfigError("evaluation.baselines are judged in an environment, which needs a single process")
    for config in configs:
        _check_outcomes(config)
    for config, directory in zip(configs, directories, strict=True):
        runs.write_run_config(directory, config)  # From now on, --overwrite knows that this is the directory of a run.
    with EnvPools() as env_pools:
        code = _train_all(configs, directories, options, env_pools)
    if code:
        return code
    for config, directory in zip(configs, directories, strict=True):
        write_comparison(config, directory)
    return 0


def _train_all(
    configs: Sequence[RLTrainConfig], directories: Sequence[pathlib.Path], options: RunOptions, env_pools: EnvPools
) -> int:
    """Trains what is not finished of runs and their baselines; returns the exit code."""
    names = configs[0].evaluation.baselines
    continued = [directory / BASELINES / OFFLINE_CONTINUED for directory in directories]
    for name in (name for name in names if name != OFFLINE_CONTINUED):
        if code := _train_baselines(configs, directories, name, options, env_pools):
            return code
    if not all(map(runs.is_finished, directories)):
        copies = continued if OFFLINE_CONTINUED in names else None
        if code := train_runs(configs, directories, options, offline_copies=copies, env_pools=env_pools):
            return code
    if OFFLINE_CONTINUED not in names:
        return 0
    allowed = (*options.allow_changed, *_CHANGED_BY_CONTINUED)
    going_on = dataclasses.replace(options, resume=True, allow_changed=allowed)
    return _train_baselines(configs, directories, OFFLINE_CONTINUED, going_on, env_pools)


def _check_outcomes(rl_config: RLTrainConfig) -> None:
    """Refuses runs and baselines that need other outcomes than the data has, before the first of them trains."""
    check_outcomes(rl_config)
    for name in rl_config.evaluation.baselines:
        try:
            check_outcomes(baseline_config(rl_config, name, {"final_step": rl_config.num_train_steps}))
        except OutcomeError as error:
            raise ConfigError(
                f"the baseline {name} cannot be trained: {error}. Or leave it out of evaluation.baselines"
            ) from error


def _train_baselines(
    configs: Sequence[RLTrainConfig],
    directories: Sequence[pathlib.Path],
    name: str,
    options: RunOptions,
    env_pools: EnvPools,
) -> int:
    """Trains the baseline `name` of the runs in `directories`, unless it is finished; returns the exit code.

    A baseline that was finished with another config is refused: the run would be compared with something else.
    """
    places = [directory / BASELINES / name for directory in directories]
    baselines = [
        baseline_config(config, name, runs.read_summary(directory))
        for config, directory in zip(configs, directories, strict=True)
    ]
    if all(map(runs.is_finished, places)):
        for baseline, place in zip(baselines, places, strict=True):
            for step in runs.saved_steps(place)[-1:]:  # somebody may have removed the checkpoints to save space
                check_resume(place / str(step), baseline, read_assets(baseline), options.allow_changed)
        return 0
    logger.info("baseline %s", name)
    return train_runs(baselines, places, dataclasses.replace(options, profile_steps=None), env_pools=env_pools)


def baseline_config(rl_config: RLTrainConfig, name: str, summary: Mapping[str, Any]) -> RLTrainConfig:
    """The config of a baseline. `offline_continued` reads the number of updates from the `summary` of the run."""
    # A baseline makes all of its updates and is evaluated once, at the end. It has no early stopping: the
    # checkpoint that `offline_continued` starts from may have used up the patience of the run.
    changes: dict[str, Any] = {
        "training.online_steps": 0,
        "training.eval_frequency": 0,
        "training.early_stopping_patience": 0,
        "evaluation.baselines": (),
    }
    if name == OFFLINE_CONTINUED:
        return apply_config_overrides(rl_config, changes | {"training.offline_steps": summary["final_step"]})
    if name == OFFLINE_SUCCESS:
        share = rl_config.qchunking.success_ratio or _SUCCESS_RATIO
        changes |= {"acrlpd.policy_data": "success", "qchunking.success_ratio": share}
        return apply_config_overrides(rl_config, changes)
    changes |= {
        "acrlpd.policy_data": "all",
        "qchunking.success_ratio": None,
        "data.rewards.failure_reward": None,
        "acrlpd.loss_weights.critic_weight": 0.0,
        "acrlpd.loss_weights.actor_weight": 0.0,
        "acrlpd.loss_weights.bc_weight": 1.0,
        "acrlpd.learnable_temperature": False,
        "acrlpd.bc_importance_weighting": False,
        "acrlpd.critic_warmup_steps": 0,
        "acrlpd.critic_updates_per_policy_update": 1,
        "acrlpd.critic_ema_decay": None,
        "weight_loader.critics": None,
        "evaluation.best_of_n": 1,
        "data.episode_filter": "success" if name == "bc_success_only" else rl_config.data.episode_filter,
    }
    return apply_config_overrides(rl_config, changes)


def write_comparison(rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
    """Adds the evaluations of the baselines to the summary of a run, and prints all of them."""
    summary = runs.read_summary(directory)
    found = dict(summary["evaluation"])
    for name in rl_config.evaluation.baselines:
        found[name] = runs.read_summary(directory / BASELINES / name)["evaluation"]["offline"]
    summary["evaluation"] = {name: found[name] for name in STAGES if name in found}
    runs.write_summary(directory, summary)
    columns = [rich.table.Column(title, justify="right") for title in ("updates", "success", "95 % interval")]
    table = rich.table.Table(
        "policy", *columns, title=f"{rl_config.exp_name}: success in the same episodes", title_justify="left"
    )
    for name, result in summary["evaluation"].items():
        success = format_percent(result["success_rate"]), format_interval(result["interval"])
        table.add_row(STAGES[name], f"{result['step']:,}", *success)
    Console().print(table)
