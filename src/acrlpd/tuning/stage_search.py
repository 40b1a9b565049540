"""The search of one stage: an Optuna study, and how trials of it begin, are repeated and end.

Optuna draws values and decides which trials are hopeless. It knows nothing of processes: a trial that was under way
when the tuner was killed stays "running" in its journal, and is repeated here.
"""

import dataclasses
import math
import statistics
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from acrlpd.tuning.distributions import from_param, to_param
from acrlpd.tuning.objective import Objective
from acrlpd.tuning.space import Stage
from acrlpd.tuning.trial import Ending

Outcome = Literal["finished", "pruned", "diverged", "failed", "repeated"]

# Trials that are random before the sampler learns from results: a third of the stage, within these limits.
_FEWEST_RANDOM, _MOST_RANDOM = 3, 10
# Results of a stage below which importances and correlations say nothing.
FEWEST_RESULTS = 6
# Results at a step before trials below their median are pruned there.
_TRIALS_BEFORE_PRUNING = 4
# Times that a trial is repeated whose process was killed from outside.
_MOST_REPEATS = 1
# A stage ends if this many draws in a row give values that were tried before.
_MOST_DRAWS = 20
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """What a report shows of a trial."""

    stage: str
    number: int  # within the stage
    values: Mapping[str, Any]  # those of the stage, and those that earlier stages have fixed
    outcome: Outcome
    score: float | None
    scores: tuple[float, ...]  # of each seed, at the last evaluation
    is_control: bool
    cpu_s: float
    wall_s: float
    reason: str = ""

    @property
    def label(self) -> str:
        return f"{self.stage} {self.number}"


@dataclasses.dataclass
class OpenTrial:
    """A trial that is under way. `values` are those of the stage."""

    trial: Trial
    values: Mapping[str, Any]
    is_control: bool
    kills: int  # how often its process was killed from outside
    reported: set[int] = dataclasses.field(default_factory=set)

    def report(self, scores: Mapping[int, tuple[float, ...]]) -> bool:
        """Tells Optuna what is new; returns whether something is."""
        new = [step for step in scores if step not in self.reported]
        for step in new:
            self.reported.add(step)
            if all(map(math.isfinite, scores[step])):
                self.trial.report(statistics.mean(scores[step]), step)
        return bool(new)


class StageSearch:
    """One stage of a study in a storage that survives kills."""

    def __init__(
        self,
        storage: optuna.storages.BaseStorage,
        position: int,
        stage: Stage,
        objective: Objective,
        *,
        own_values: Mapping[str, Any],
        incumbent: TrialRecord | None,
        num_trials: int,
        seed: int,
    ) -> None:
        """`own_values` are the config's. `incumbent` is the best trial of earlier stages; None in the first stage."""
        self.stage, self._objective, self._seed, self._num_trials = stage, objective, seed, num_trials
        self._distributions = {key: one.to_optuna() for key, one in stage.distributions.items()}
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # The tuner says what happens.
        self._study = optuna.create_study(
            storage=storage,
            study_name=_study_name(position, stage),
            load_if_exists=True,
            direction=objective.direction,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_TRIALS_BEFORE_PRUNING),
        )
        if not self._study.trials:
            self._begin(own_values, incumbent)
        # Values of the stages before.
        self.fixed: dict[str, Any] = dict(self._study.trials[0].user_attrs.get("fixed", {}))
        self._repeat_what_was_lost()

    def _begin(self, own_values: Mapping[str, Any], incumbent: TrialRecord | None) -> None:
        """The first entry is the control, or the best trial so far, whose result need not be computed again."""
        params = {key: to_param(one, own_values[key]) for key, one in self.stage.distributions.items()}
        if incumbent is None:
            self._study.enqueue_trial(params, user_attrs={"is_control": True})
            return
        assert incumbent.score is not None
        copied = optuna.trial.create_trial(
            params=params,
            distributions=self._distributions,
            value=incumbent.score,
            user_attrs={"fixed": dict(incumbent.values), "copied_from": incumbent.label},
        )
        self._study.add_trial(copied)

    def _repeat_what_was_lost(self) -> None:
        """Trials that were under way in a tuner that is gone, and a control that failed, are made again."""
        for lost in self._study.trials:
            has_failed = lost.state == TrialState.FAIL and lost.user_attrs.get("is_control", False)
            if lost.state == TrialState.RUNNING or has_failed:
                # The end of the tuner is not the fault of the trial, so it does not count as a kill.
                self._repeat(lost.number, lost.params, lost.user_attrs, kills=lost.user_attrs.get("kills", 0))
            if lost.state == TrialState.RUNNING:
                self._study.tell(lost.number, state=TrialState.FAIL)

    def _repeat(self, number: int, params: Mapping[str, Any], attrs: Mapping[str, Any], kills: int) -> None:
        """Queues the same values again, unless that has been done."""
        if number not in self._repeated():
            kept = {"is_control": True} if attrs.get("is_control", False) else {}
            self._study.enqueue_trial(dict(params), user_attrs=kept | {"repeats": number, "kills": kills})

    def _repeated(self) -> set[int]:
        return {trial.user_attrs["repeats"] for trial in self._study.trials if "repeats" in trial.user_attrs}

    @property
    def num_finished(self) -> int:
        """Trials that count: they came to an end, and are not repeated."""
        return sum(record.outcome != "repeated" for record in self.records())

    @property
    def has_control(self) -> bool:
        """Whether the config itself has its result, which all other trials are compared with."""
        return bool(self.fixed) or any(one.is_control and one.outcome == "finished" for one in self.records())

    def ask(self) -> OpenTrial | None:
        """The next trial; None if Optuna draws nothing but values that were tried.

        The values follow from the seed and from the results so far, also after an interruption. The same values with
        the same seeds give the same result, so no trial is made twice.
        """
        for _ in range(_MOST_DRAWS):
            trial = self._draw()
            values = {key: from_param(one, trial.params[key]) for key, one in self.stage.distributions.items()}
            attrs, repeated = trial.user_attrs, self._repeated()
            known = [
                other
                for other in self._study.trials
                if other.params == trial.params and other.number not in {trial.number, *repeated}
            ]
            if not known or "repeats" in attrs or "is_control" in attrs:
                return OpenTrial(trial, values, attrs.get("is_control", False), attrs.get("kills", 0))
            trial.set_user_attr("copied_from", f"{self.stage.name} {known[0].number}")
            score = known[0].value if known[0].state == TrialState.COMPLETE else None
            self._study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
        return None

    def _draw(self) -> Trial:
        random = min(max(self._num_trials // 3, _FEWEST_RANDOM), _MOST_RANDOM)
        with warnings.catch_warnings():
            # Optuna calls both options experimental; without them, trials at the same time would be alike.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=random,
                multivariate=True,
                constant_liar=True,
                seed=self._seed + len(self._study.trials),
            )
        return self._study.ask(self._distributions)

    def close(
        self, opened: OpenTrial, outcome: Outcome, ending: Ending, scores: Mapping[int, tuple[float, ...]]
    ) -> TrialRecord:
        """Writes down how a trial ended. A trial whose process was killed from outside is repeated once."""
        trial, last = opened.trial, scores[max(scores)] if scores else ()
        if outcome == "failed" and ending.was_killed and opened.kills < _MOST_REPEATS:
            outcome = "repeated"
            self._repeat(trial.number, trial.params, trial.user_attrs, kills=opened.kills + 1)
        if outcome == "finished" and not (last and all(map(math.isfinite, last))):
            outcome = "diverged" if last else "failed"
        facts: dict[str, Any] = {
            "outcome": outcome,
            "scores": list(last),
            "cpu_s": ending.cpu_s,
            "wall_s": ending.wall_s,
        }
        if outcome in ("failed", "repeated"):
            facts["reason"] = ending.reason if ending.code else f"no evaluation has the metric {self._objective.metric}"
        for name, value in facts.items():
            trial.set_user_attr(name, value)
        # For the sampler, a trial that diverged is worse than every trial that did not.
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "diverged": TrialState.PRUNED}
        score = statistics.mean(last) if outcome == "finished" else None
        self._study.tell(trial, score, states.get(outcome, TrialState.FAIL))
        [record] = [record for record in self.records() if record.number == trial.number]
        return record

    def records(self) -> list[TrialRecord]:
        """The trials that have ended, in their order, without those whose result was copied from another trial."""
        repeated = self._repeated()
        trials = [trial for trial in self._study.trials if "copied_from" not in trial.user_attrs]
        return [self._record(trial, repeated) for trial in trials if trial.state in _FINISHED]

    def _record(self, trial: FrozenTrial, repeated: set[int]) -> TrialRecord:
        attrs = trial.user_attrs
        # A kill may have come before all values were drawn.
        drawn = {key: one for key, one in self.stage.distributions.items() if key in trial.params}
        values = {key: from_param(one, trial.params[key]) for key, one in drawn.items()}
        return TrialRecord(
            stage=self.stage.name,
            number=trial.number,
            values=self.fixed | values,
            outcome="repeated" if trial.number in repeated else attrs.get("outcome", "failed"),
            score=trial.value if trial.state == TrialState.COMPLETE else None,
            scores=tuple(attrs.get("scores", ())),
            is_control=attrs.get("is_control", False),
            cpu_s=attrs.get("cpu_s", 0.0),
            wall_s=attrs.get("wall_s", 0.0),
            reason=attrs.get("reason", ""),
        )

    def importances(self) -> dict[str, float]:
        """The share of each key in what makes a trial one of the best (PED-ANOVA); empty for too few results."""
        finished = [trial for trial in self._study.trials if trial.state == TrialState.COMPLETE]
        has_best = len({trial.value for trial in finished}) > 1
        if len(finished) < FEWEST_RESULTS or not has_best or len(self._distributions) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        return optuna.importance.get_param_importances(
            self._study, evaluator=evaluator, params=list(self._distributions)
        )


def best_trial(records: Iterable[TrialRecord], objective: Objective) -> TrialRecord | None:
    """The best trial that finished; of equal ones the first, so that the config itself wins a tie."""
    best, highest = None, 0.0
    for record in records:
        if record.score is not None and (best is None or objective.gain(record.score, highest) > 0):
            best, highest = record, record.score
    return best


def is_begun(storage: optuna.storages.BaseStorage, position: int, stage: Stage) -> bool:
    """Whether the storage has this stage."""
    return _study_name(position, stage) in optuna.study.get_all_study_names(storage)


def _study_name(position: int, stage: Stage) -> str:
    return f"{position}-{stage.name}"
