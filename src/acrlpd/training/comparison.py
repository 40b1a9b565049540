"""What a run is compared with: the same data, seeds and number of updates, without RL or without acting."""

import pathlib
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.table

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.runs import directory as runs
from acrlpd.training.distributed import is_primary

BASELINES = "baselines"
OFFLINE_CONTINUED = "offline_continued"
# Fields in which a baseline that goes on from the run's checkpoint differs from it.
CHANGED_BY_BASELINES = ("training", "evaluation")

# In the order in which a person reads them.
DESCRIPTIONS = {
    "bc": "imitation of all demonstrations",
    "bc_success_only": "imitation of the successful ones",
    "offline": "offline RL",
    OFFLINE_CONTINUED: "offline RL, as many updates as online RL",
    "online": "online RL",
}


def baseline_directory(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / BASELINES / name


def baseline_config(rl_config: RLTrainConfig, name: str, summary: Mapping[str, Any]) -> RLTrainConfig:
    """The config of a baseline; `summary` is that of the run, where the baseline comes after it."""
    # Judged once, at the end, so it makes all of its updates; the checkpoint that it goes on from may be out of
    # patience.
    changes: dict[str, Any] = {
        "training.online_steps": 0,
        "training.eval_frequency": 0,
        "training.early_stopping_patience": 0,
        "evaluation.baselines": (),
    }
    if name == OFFLINE_CONTINUED:
        return apply_config_overrides(rl_config, changes | {"training.offline_steps": summary["final_step"]})
    changes |= {
        "acrlpd.loss_weights.critic_weight": 0.0,
        "acrlpd.loss_weights.actor_weight": 0.0,
        "acrlpd.loss_weights.bc_weight": 1.0,
        "acrlpd.learnable_temperature": False,
        "acrlpd.bc_importance_weighting": False,
        "acrlpd.critic_warmup_steps": 0,
        "evaluation.best_of_n": 1,
        "data.episode_filter": "success" if name == "bc_success_only" else rl_config.data.episode_filter,
    }
    return apply_config_overrides(rl_config, changes)


def write_comparison(rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
    """Puts what the baselines reached into the run's summary, and shows all of it."""
    summary = runs.read_summary(directory)
    found = dict(summary["evaluation"])
    for name in rl_config.evaluation.baselines:
        found[name] = runs.read_summary(baseline_directory(directory, name))["evaluation"]["offline"]
    summary["evaluation"] = {name: found[name] for name in DESCRIPTIONS if name in found}
    if is_primary():
        runs.write_summary(directory, summary)
        print_comparison(summary["evaluation"])


def evaluation_summary(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """How the policy did at a step, for summary.json."""
    rest: dict[str, Any] = {
        name: value for name, value in metrics.items() if name not in ("success_rate_low", "success_rate_high")
    }
    if "success_rate_low" in metrics:
        rest["interval"] = [metrics["success_rate_low"], metrics["success_rate_high"]]
    return {"step": step} | rest


def print_comparison(evaluation: Mapping[str, Mapping[str, Any]]) -> None:
    table = rich.table.Table(title="success in the same episodes", title_justify="left")
    table.add_column("policy")
    table.add_column("updates", justify="right")
    table.add_column("success", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, result in evaluation.items():
        low, high = result["interval"]
        table.add_row(
            DESCRIPTIONS[name], f"{result['step']:,}", f"{result['success_rate']:.0%}", f"{low:.0%} to {high:.0%}"
        )
    rich.console.Console().print(table)
