"""What a study found, as Markdown and as a table in the terminal."""

import dataclasses
import datetime
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import rich.table

from acrlpd.config import RLTrainConfig
from acrlpd.console import Console
from acrlpd.evaluation.statistics import MeanOverSeeds, mean_over_seeds, rank_correlation, wilson_interval
from acrlpd.text import escape_markdown, markdown_table, print
from acrlpd.tuning.distributions import is_number
from acrlpd.tuning.final import FinalComparison
from acrlpd.tuning.objective import Objective
from acrlpd.tuning.space import Stage, read_value
from acrlpd.tuning.stage_search import FEWEST_RESULTS, TrialRecord
from acrlpd.tuning.study_files import BEST_FILE, REPORT_FILE, StudySettings
from acrlpd.units import format_interval, format_percent, format_seconds

_NUM_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class StageResult:
    """The trials of one stage, and the importances of its keys; empty for too few results."""

    stage: Stage
    records: tuple[TrialRecord, ...]
    importances: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """A study that has come to its end."""

    config: RLTrainConfig
    objective: Objective
    settings: StudySettings
    stages: tuple[StageResult, ...]
    best: TrialRecord
    final: FinalComparison | None  # None: the config itself is the best trial, or no fresh seeds were asked for
    directory: pathlib.Path

    @property
    def records(self) -> list[TrialRecord]:
        return [record for stage in self.stages for record in stage.records]

    @property
    def control(self) -> TrialRecord:
        return next(record for record in self.records if record.is_control and record.score is not None)

    @property
    def ranked(self) -> list[TrialRecord]:
        """The trials with a score, best first."""
        finished = [record for record in self.records if record.score is not None]
        return sorted(finished, key=lambda record: record.score or 0.0, reverse=self.objective.is_success)

    @property
    def verdict(self) -> str:
        """What the study shows, in a sentence or two."""
        if self.best.is_control:
            return (
                "No trial was better than the config itself: within this space, and as far as so many trials can tell, "
                "the config is at a plateau."
            )
        if self.final is None:
            return f"{self.best.label} has the best score. It was not judged on fresh seeds, so its score is too high."
        gain = mean_over_seeds(self.final.gains)
        described = _describe_gain(gain, self.objective)
        compared = f"On {len(self.final.seeds)} fresh seeds, {self.best.label} is {described} than the config itself"
        if gain.interval is not None and gain.interval[0] > 0:
            return f"{compared}: the config was improved."
        if gain.interval is not None and gain.interval[1] < 0:
            return f"{compared}: the winner of the trials is worse, so keep the config."
        return f"{compared}. The interval contains zero, so an improvement was not shown."


def describe_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe_gain(gain: MeanOverSeeds, objective: Objective) -> str:
    better, size = "better" if gain.mean >= 0 else "worse", abs(gain.mean)
    ends = gain.interval if gain.interval is None or gain.mean >= 0 else (-gain.interval[1], -gain.interval[0])
    if objective.is_success:
        text = f"{100 * size:.1f} points {better}"
        return text if ends is None else f"{text} (95 % interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    text = f"{size:.4g} {better}"
    return text if ends is None else f"{text} (95 % interval {ends[0]:.4g} to {ends[1]:.4g})"


def print_result(result: StudyResult) -> None:
    """The best trials, the verdict, and where everything lies."""
    columns = [rich.table.Column("score", justify="right"), rich.table.Column("seeds", justify="right")]
    table = rich.table.Table(
        "trial", *columns, "values", title=f"{result.config.name}: {result.objective.title}", title_justify="left"
    )
    for row in _best_rows(result):
        table.add_row(*row)
    Console().print(table)
    print(result.verdict)
    print(f"report {result.directory / REPORT_FILE}")
    best = shlex.quote(str(result.directory / BEST_FILE))
    print(f"the best config: acrlpd train --config {best} --exp_name tuned")


def _shown(result: StudyResult) -> list[TrialRecord]:
    """The best trials, and the config itself wherever it stands."""
    best = result.ranked[:_NUM_SHOWN]
    return best if result.control in best else [*best, result.control]


def _best_rows(result: StudyResult) -> Iterator[tuple[str, str, str, str]]:
    """Name, score, scores of the seeds, and values of the trials that are shown."""
    form = result.objective.format
    for record in _shown(result):
        assert record.score is not None
        name = f"{record.label} (the config itself)" if record.is_control else record.label
        yield name, form(record.score), ", ".join(map(form, record.scores)), describe_values(record.values)


def render_report(result: StudyResult) -> str:
    """The whole report as Markdown."""
    parts = [*_head(result), *_best_trials(result), *_final(result), *_stages(result), *_endings(result)]
    return "\n".join(parts) + "\n"


def _head(result: StudyResult) -> Iterator[str]:
    settings, config = result.settings, result.config
    length = f"{settings.trial_steps:,} updates" if settings.trial_steps else "the whole training"
    cpu_s, wall_s = (sum(times) for times in zip(*((r.cpu_s, r.wall_s) for r in result.records), strict=True))
    made = sum(record.outcome != "repeated" for record in result.records)
    judged = f", {config.evaluation.num_episodes} episodes each" if result.objective.is_success else ""
    yield f"# {escape_markdown(config.name)}: a study of {made} trials\n"
    yield f"{escape_markdown(result.verdict)}\n"
    yield f"- Score: {escape_markdown(result.objective.title)} (`{result.objective.metric}`), mean over the seeds"
    yield f"- A trial: {length}, seeds {', '.join(map(str, settings.seeds))}{judged}"
    yield f"- Time of the trials, added up: {format_seconds(wall_s)}, and {format_seconds(cpu_s)} of processor time"
    yield f"- Made {datetime.datetime.now():%Y-%m-%d %H:%M} by acrlpd {version('acrlpd')}\n"


def _best_trials(result: StudyResult) -> Iterator[str]:
    yield "## The best trials\n"
    titles, rows = (
        ["trial", "score", "seeds", "values"],
        [list(map(escape_markdown, row)) for row in _best_rows(result)],
    )
    if result.objective.is_success:
        titles.insert(3, "95 % interval of the episodes")
        for row, record in zip(rows, _shown(result), strict=True):
            row.insert(3, _episode_interval(record, result))
    yield markdown_table(titles, rows)
    again = "" if result.final is None else " It is judged again below."
    yield f"\nThe best of many trials is partly the luckiest, so its score is too high.{again}\n"


def _episode_interval(record: TrialRecord, result: StudyResult) -> str:
    assert record.score is not None
    episodes = result.config.evaluation.num_episodes * len(record.scores)
    return format_interval(wilson_interval(round(record.score * episodes), episodes))


def _final(result: StudyResult) -> Iterator[str]:
    yield "## The winner on fresh seeds\n"
    final, form = result.final, result.objective.format
    if final is None:
        yield f"{escape_markdown(result.verdict)}\n"
        return
    episodes = f", nor these episodes ({final.episodes} for each seed)" if final.episodes else ""
    yield f"Both sides trained {final.steps:,} updates. No trial had these seeds{episodes}.\n"
    sides = {"the config itself": final.preset, escape_markdown(result.best.label): final.winner}
    rows = [[name, *map(form, scores), _mean(final.mean(scores), result.objective)] for name, scores in sides.items()]
    gains = (f"{gain:+.3g}" for gain in final.gains)
    rows.append(["gain of the winner", *gains, _signed_mean(mean_over_seeds(final.gains))])
    yield markdown_table(["", *(f"seed {seed}" for seed in final.seeds), "mean (95 % interval over the seeds)"], rows)
    yield f"\n{escape_markdown(result.verdict)}\n"


def _mean(mean: MeanOverSeeds, objective: Objective) -> str:
    if mean.interval is None:
        return objective.format(mean.mean)
    if objective.is_success:
        return f"{format_percent(mean.mean, digits=1)} ({format_interval(mean.interval)})"
    return f"{mean.mean:.4g} ({mean.interval[0]:.4g} to {mean.interval[1]:.4g})"


def _signed_mean(mean: MeanOverSeeds) -> str:
    ends = "" if mean.interval is None else f" ({mean.interval[0]:+.3g} to {mean.interval[1]:+.3g})"
    return f"{mean.mean:+.3g}{ends}"


def _stages(result: StudyResult) -> Iterator[str]:
    yield "## What mattered\n"
    yield (
        "The importance is the share of a key in what separates the best quarter of the trials of its stage from the "
        "others (PED-ANOVA). The rank correlation says whether larger values had larger scores. Both come from few "
        "and noisy trials.\n"
    )
    for stage in result.stages:
        scored = [record for record in stage.records if record.score is not None]
        yield f"### {escape_markdown(stage.stage.name)}: {len(scored)} trials with a score\n"
        rows = [_key_row(key, stage, scored, result) for key in stage.stage.distributions]
        yield markdown_table(["key", "searched", "config", "best", "importance", "rank correlation"], rows)
        yield ""


def _key_row(key: str, stage: StageResult, scored: Sequence[TrialRecord], result: StudyResult) -> list[str]:
    importance = stage.importances.get(key)
    return [
        f"`{key}`",
        escape_markdown(str(stage.stage.distributions[key].to_plain())),
        escape_markdown(_short(read_value(result.config, key))),
        escape_markdown(_short(result.best.values.get(key, read_value(result.config, key)))),
        "-" if importance is None else f"{importance:.2f}",
        _correlation(key, scored),
    ]


def _correlation(key: str, scored: Sequence[TrialRecord]) -> str:
    places = [record.values[key] for record in scored]
    if len(scored) < FEWEST_RESULTS or not all(map(is_number, places)):
        return "-"
    found = rank_correlation(np.array(places), np.array([record.score for record in scored]))
    return "-" if found is None else f"{found:+.2f}"


def _endings(result: StudyResult) -> Iterator[str]:
    yield "## All trials\n"
    rows = []
    for record in result.records:
        found = "" if record.score is None else result.objective.format(record.score)
        outcome = f"{record.outcome}: {record.reason}" if record.reason else record.outcome
        values = escape_markdown(describe_values(record.values))
        rows.append(
            [escape_markdown(record.label), escape_markdown(outcome), found, format_seconds(record.cpu_s), values]
        )
    yield markdown_table(["trial", "how it ended", "score", "processor time", "values"], rows)
