"""What a trial is judged by: a number from the evaluations that training makes anyway."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.runs.directory import METRICS_FILE
from acrlpd.runs.metrics_log import EVALUATION, VALIDATION, MetricsReader
from acrlpd.units import format_percent

# Share of the updates since the last line of metrics that may be skipped before a run counts as diverged.
_MOST_SKIPPED = 0.5


@dataclasses.dataclass(frozen=True)
class Objective:
    """A metric of runs. The score of a trial is its mean over the seeds."""

    metric: str
    title: str
    is_success: bool  # a share of episodes, of which more is better; otherwise an error, of which less is better

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        return "maximize" if self.is_success else "minimize"

    def gain(self, score: float, other: float) -> float:
        """How much better the score is than the other one; below 0 where it is worse."""
        return score - other if self.is_success else other - score

    def format(self, score: float) -> str:
        return format_percent(score, digits=1) if self.is_success else f"{score:.4g}"


def choose_objective(config: RLTrainConfig) -> Objective:
    """Success in the environment; without an environment, the error of the policy's actions on held-out episodes.

    With critics, the actions are those that the critics choose among the candidates, so that the score depends on both.
    """
    if config.env.id is not None and config.evaluation.num_episodes > 0:
        return Objective(f"{EVALUATION}success_rate", f"success in {config.env.id}", is_success=True)
    if config.data.validation_share == 0:
        raise ConfigError(
            "a trial cannot be judged: the config has no environment (env.id), and no episodes are held out "
            "(data.validation_share is 0). Set one of the two"
        )
    if config.acrlpd.loss_weights.critic_weight > 0:
        title = "error of the best-of-N actions on held-out episodes, as a share of the mean action's"
        return Objective(f"{VALIDATION}relative_best_of_n_error", title, is_success=False)
    title = "error of the policy's actions on held-out episodes, as a share of the mean action's"
    return Objective(f"{VALIDATION}relative_action_error", title, is_success=False)


class ScoreReader:
    """Reads the scores of runs that train together, again and again while they train."""

    def __init__(self, directories: Sequence[pathlib.Path], objective: Objective) -> None:
        self._objective = objective
        self._metrics = [MetricsReader(directory / METRICS_FILE) for directory in directories]

    def read(self) -> dict[int, tuple[float, ...]]:
        """Step -> the score of each run, for the steps at which all runs have been judged."""
        found = []
        for metrics in self._metrics:
            metrics.read()
            series = metrics.series.get(self._objective.metric)
            pairs = () if series is None else zip(series.steps.tolist(), series.values.tolist(), strict=True)
            found.append(dict(pairs))
        steps = sorted(set.intersection(*(set(one) for one in found)))
        return {step: tuple(one[step] for one in found) for step in steps}

    @property
    def has_diverged(self) -> bool:
        """Whether a run skips most of its updates because their gradients are not finite, by what was read last."""
        skipped = [metrics.series.get("update_skipped") for metrics in self._metrics]
        return any(series is not None and series.values[-1] > _MOST_SKIPPED for series in skipped)
