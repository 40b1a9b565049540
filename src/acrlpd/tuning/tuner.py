"""`run_study`: all stages of a study, trial by trial, then the final comparison and the report.

One loop watches the processes of all trials that are under way. It reads their evaluations, ends those that are
hopeless or have diverged, and starts the next ones. The first trial is the config itself and runs alone: if it cannot
be trained, no other trial is tried, and what the first trial makes (demonstrations, compiled programs) is there for
the others.
"""

import contextlib
import logging
import pathlib
import statistics
import time
from collections.abc import Iterator

import optuna

from acrlpd.config import ConfigError, RLTrainConfig, config_to_yaml
from acrlpd.files import only_one, write_text_atomically
from acrlpd.training.progress import ProgressBars
from acrlpd.tuning import study_files
from acrlpd.tuning.final import FinalComparison, compare_on_fresh_seeds
from acrlpd.tuning.report import StageResult, StudyResult, describe_values, print_result, render_report
from acrlpd.tuning.space import Space, read_value, with_values
from acrlpd.tuning.stage_search import OpenTrial, Outcome, StageSearch, TrialRecord, best_trial, is_begun
from acrlpd.tuning.study_files import StudySettings
from acrlpd.tuning.trial import LOG_FILE, TrialProcess, TrialStarter, remove, remove_checkpoints, shorten
from acrlpd.units import format_duration

logger = logging.getLogger(__name__)

_POLL_S = 0.5


def run_study(
    config: RLTrainConfig,
    space: Space,
    settings: StudySettings,
    starter: TrialStarter,
    *,
    trials: int,
    final_seeds: int,
    final_steps: int | None,
) -> StudyResult:
    """Makes what is missing of the study, and writes the report and the best config; returns the result.

    The winner is judged again on `final_seeds` seeds that no trial had, each with `final_steps` updates.
    """
    objective, directory = starter.objective, study_files.study_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory, "working on this study; wait for it or stop it", ConfigError):
        settings = study_files.claim(directory, config, space, settings)
        tuner = _Tuner(config, space, settings, starter, directory, trials)
        stages = tuner.search()
        best = best_trial((record for stage in stages for record in stage.records), objective)
        assert best is not None  # without a result of the config itself there is no study
        comparison: FinalComparison | None = None
        if not best.is_control and final_seeds:
            logger.info("judging %s and the config itself on %d fresh seeds", best.label, final_seeds)
            comparison = compare_on_fresh_seeds(
                preset=config,
                winner=with_values(config, best.values),
                directory=directory / study_files.FINAL,
                starter=starter,
                used_seeds=settings.seeds,
                num_seeds=final_seeds,
                steps=settings.trial_steps if final_steps is None else final_steps,
            )
        result = StudyResult(
            config=config,
            objective=objective,
            settings=settings,
            stages=stages,
            best=best,
            final=comparison,
            directory=directory,
        )
        write_text_atomically(directory / study_files.BEST_FILE, _best_yaml(result))
        write_text_atomically(directory / study_files.REPORT_FILE, render_report(result))
        print_result(result)
    return result


def _best_yaml(result: StudyResult) -> str:
    """The winner as a complete config, which keeps the length and the baselines of the config that was tuned."""
    changed = describe_values(result.best.values)
    header = f"# {result.config.name}, tuned: {changed}\n# {study_files.REPORT_FILE} says how much this is worth.\n"
    return header + config_to_yaml(with_values(result.config, result.best.values))


class _Tuner:
    """The search over all stages."""

    def __init__(
        self,
        config: RLTrainConfig,
        space: Space,
        settings: StudySettings,
        starter: TrialStarter,
        directory: pathlib.Path,
        trials: int,
    ) -> None:
        self._config, self._space, self._settings, self._starter = config, space, settings, starter
        self._objective, self._directory, self._trials = starter.objective, directory, trials
        self._short = shorten(config, settings.trial_steps, settings.evaluations)
        self._running: dict[int, tuple[OpenTrial, TrialProcess]] = {}
        self._earlier: list[TrialRecord] = []  # of the stages before the present one
        self._bars = ProgressBars(enabled=True)
        self._bar = self._bars.add_task("trials", total=trials, text="")
        self._begin = time.monotonic()
        self._num_made = 0  # trials that this process has made

    def search(self) -> tuple[StageResult, ...]:
        """Makes the trials that are missing; returns the results of the stages that have begun."""
        storage, stages = study_files.open_storage(self._directory), []
        shares = study_files.share_trials(self._trials, self._settings.split)
        with self._bars, self._processes():
            for position, (stage, share) in enumerate(zip(self._space.stages, shares, strict=True)):
                if not share and not is_begun(storage, position, stage):
                    break
                search = self._open(storage, position, share)
                for lost in (record for record in search.records() if record.outcome == "repeated"):
                    remove(self._trial_directory(lost.stage, lost.number))
                self._show(search)
                self._run(search, share)
                stages.append(StageResult(stage, tuple(search.records()), search.importances()))
                self._earlier += search.records()
        return tuple(stages)

    def _open(self, storage: optuna.storages.BaseStorage, position: int, share: int) -> StageSearch:
        stage = self._space.stages[position]
        return StageSearch(
            storage,
            position,
            stage,
            self._objective,
            own_values={key: read_value(self._config, key) for key in stage.distributions},
            incumbent=best_trial(self._earlier, self._objective),
            num_trials=share,
            seed=self._config.seed + 1_000 * position,
        )

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """Ends the trials that are under way when the tuner is interrupted; they are repeated when it goes on."""
        try:
            yield
        finally:
            for _, process in self._running.values():
                process.kill()

    def _run(self, search: StageSearch, share: int) -> None:
        is_open = True
        while True:
            limit = self._starter.jobs if search.has_control else 1
            while is_open and len(self._running) < limit and search.num_finished + len(self._running) < share:
                is_open = self._start(search)
            if not self._running:
                return
            time.sleep(_POLL_S)
            for number in list(self._running):
                self._watch(search, number)

    def _start(self, search: StageSearch) -> bool:
        """Starts the next trial; returns False if there is nothing new to try in this stage."""
        opened = search.ask()
        if opened is None:
            logger.info("%s: all other values that come up were tried", search.stage.name)
            return False
        config = with_values(self._short, {**search.fixed, **opened.values})
        directory = self._trial_directory(search.stage.name, opened.trial.number)
        self._running[opened.trial.number] = opened, self._starter.start(config, self._settings.seeds, directory)
        return True

    def _trial_directory(self, stage: str, number: int) -> pathlib.Path:
        return self._directory / study_files.TRIALS / f"{stage}-{number}"

    def _watch(self, search: StageSearch, number: int) -> None:
        """Looks at one process: goes on, or writes down how the trial ended."""
        opened, process = self._running[number]
        ending, scores = process.poll(), process.scores.read()
        is_new = opened.report(scores)
        outcome: Outcome
        if ending is not None:
            outcome = "finished" if ending.code == 0 else "diverged" if process.scores.has_diverged else "failed"
        elif process.scores.has_diverged:
            outcome, ending = "diverged", process.kill()
        elif is_new and max(scores) < self._short.num_train_steps and self._is_hopeless(opened):
            outcome, ending = "pruned", process.kill()
        else:
            return
        del self._running[number]
        record = search.close(opened, outcome, ending, scores)
        self._tidy(search, record)
        self._announce(search, record)
        if record.is_control and record.outcome not in ("finished", "repeated"):
            log = self._trial_directory(record.stage, record.number) / LOG_FILE
            reason = record.reason or record.outcome
            raise ConfigError(f"the config itself, trial 0, cannot be trained: {reason}\n{log} has all messages")

    def _is_hopeless(self, opened: OpenTrial) -> bool:
        return not opened.is_control and opened.trial.should_prune()

    def _tidy(self, search: StageSearch, record: TrialRecord) -> None:
        """Keeps the checkpoints of the best trial only."""
        if record.outcome == "repeated":
            remove(self._trial_directory(record.stage, record.number))
        best = self._best(search)
        kept = [process.directory for _, process in self._running.values()]
        kept += [self._trial_directory(best.stage, best.number)] if best else []
        for trial in (self._directory / study_files.TRIALS).iterdir():
            if trial not in kept:
                remove_checkpoints(trial)

    def _best(self, search: StageSearch) -> TrialRecord | None:
        return best_trial(self._earlier + search.records(), self._objective)

    def _announce(self, search: StageSearch, record: TrialRecord) -> None:
        found = record.outcome if record.score is None else self._objective.format(record.score)
        if record.outcome == "pruned" and record.scores:
            found += f" at {self._objective.format(statistics.mean(record.scores))}"
        drawn = describe_values({key: record.values[key] for key in search.stage.distributions})
        which = f"the config itself, {drawn}" if record.is_control else drawn
        reason = f" ({record.reason})" if record.reason else ""
        logger.info("%s: %s: %s%s", record.label, which, found, reason)
        self._num_made += 1
        self._show(search)

    def _show(self, search: StageSearch) -> None:
        """The number of trials that count, the best one, and how long the rest will take."""
        done = sum(record.outcome != "repeated" for record in self._earlier + search.records())
        parts = []
        if (best := self._best(search)) is not None and best.score is not None:
            parts.append(f"best {self._objective.format(best.score)} ({best.label})")
        if self._num_made and done < self._trials:
            left = (time.monotonic() - self._begin) / self._num_made * (self._trials - done)
            parts.append(f"about {format_duration(left)} left")
        self._bars.update(self._bar, completed=done, text=", ".join(parts))
        if self._bars.logs:
            logger.info("trials %d/%d  %s", done, self._trials, ", ".join(parts))
