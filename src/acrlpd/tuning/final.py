"""The last step of a study: the winner against the config itself, on seeds and episodes that no trial had.

The best of many trials is partly the luckiest one, so its score is too high. Neither the seeds of the trainings nor
the episodes of the evaluations that chose the winner are used here.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, config_hash
from acrlpd.evaluation.statistics import RATES, MeanOverSeeds, mean_over_seeds
from acrlpd.runs.directory import is_finished
from acrlpd.tuning.objective import Objective, ScoreReader
from acrlpd.tuning.trial import LOG_FILE, TrialProcess, TrialStarter, remove_checkpoints, runs_of_trial, shorten

_POLL_S = 0.5
# How far the seeds of the episodes lie from those of the trials.
_OTHER_EPISODES = 1_000_000


@dataclasses.dataclass(frozen=True)
class FinalComparison:
    """Scores of the same fresh seeds, one for each seed in the order of `seeds`."""

    objective: Objective
    seeds: tuple[int, ...]
    steps: int
    episodes: int  # for each seed; 0 where runs are not judged in an environment
    preset: tuple[float, ...]
    winner: tuple[float, ...]

    @property
    def gains(self) -> tuple[float, ...]:
        """How much better the winner is, seed by seed."""
        return tuple(map(self.objective.gain, self.winner, self.preset))

    def mean(self, scores: Sequence[float]) -> MeanOverSeeds:
        """The mean of the scores of one side."""
        return mean_over_seeds(scores, RATES if self.objective.is_success else (0.0, float("inf")))


def compare_on_fresh_seeds(
    *,
    preset: RLTrainConfig,
    winner: RLTrainConfig,
    directory: pathlib.Path,
    starter: TrialStarter,
    used_seeds: Sequence[int],
    num_seeds: int,
    steps: int | None,
) -> FinalComparison:
    """Trains both sides, unless they were trained before, and compares them."""
    objective = starter.objective
    seeds = tuple(range(max(used_seeds) + 1, max(used_seeds) + 1 + num_seeds))
    sides = [_judged_once(config, steps) for config in (preset, winner)]
    places = [directory / f"{config_hash(side)}-seeds-{seeds[0]}-{seeds[-1]}" for side in sides]
    pending = [i for i, side in enumerate(sides) if not _is_trained(side, seeds, places[i])]
    running: dict[int, TrialProcess] = {}
    try:
        while pending or running:
            while pending and len(running) < starter.jobs:
                i = pending.pop(0)
                running[i] = starter.start(sides[i], seeds, places[i])
            time.sleep(_POLL_S)
            for i, process in list(running.items()):
                if (ending := process.poll()) is not None:
                    del running[i]
                    if ending.code:
                        log = places[i] / LOG_FILE
                        raise ConfigError(f"the final comparison failed, {ending.reason}\n{log} has all messages")
                    remove_checkpoints(places[i])
    finally:
        for process in running.values():
            process.kill()
    preset_scores, winner_scores = (
        _final_scores(side, seeds, place, objective) for side, place in zip(sides, places, strict=True)
    )
    episodes = sides[0].evaluation.num_episodes if objective.is_success else 0
    return FinalComparison(objective, seeds, sides[0].num_train_steps, episodes, preset_scores, winner_scores)


def _judged_once(config: RLTrainConfig, steps: int | None) -> RLTrainConfig:
    """The config with fresh episodes, judged at the end of its training alone."""
    seed = (config.evaluation.seed + _OTHER_EPISODES) % 2**32
    return apply_config_overrides(shorten(config, steps, evaluations=1), {"evaluation.seed": seed})


def _is_trained(config: RLTrainConfig, seeds: Sequence[int], directory: pathlib.Path) -> bool:
    return all(is_finished(run) for run in runs_of_trial(config, seeds, directory))


def _final_scores(
    config: RLTrainConfig, seeds: Sequence[int], directory: pathlib.Path, objective: Objective
) -> tuple[float, ...]:
    scores = ScoreReader(runs_of_trial(config, seeds, directory), objective).read()
    if not scores:
        raise ConfigError(f"{directory}: the runs of the final comparison were never judged by {objective.metric}")
    return scores[max(scores)]
