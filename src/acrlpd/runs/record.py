"""What a run left in its directory, read without JAX: config, metrics, evaluations, anomalies, checkpoints.

A run may be under way, cut off or from an earlier version: what is not there is left out, what is there but
cannot be read is an error that names the file, and what was skipped is in `RunRecord.problems`.
"""

import array
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from acrlpd.config import ConfigError, get_config, to_dict
from acrlpd.config.tree import flatten
from acrlpd.runs.directory import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, saved_steps

ANOMALIES_FILE = "anomalies.jsonl"
PROFILE_FILE = "profile.json"
EVALUATIONS = "evaluations"
EVALUATION_FILE = "evaluation.json"
BASELINES = "baselines"  # the runs that a run is compared with

# Stages of a run that are judged against each other, in the order of a table.
STAGES = ("bc", "bc_success_only", "offline", "offline_continued", "online")
# Differences to the preset that say nothing about what is computed.
_NOT_A_CHANGE = ("name", "exp_name")


class RunError(ValueError):
    """A directory that does not hold a run, or a file of a run that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric over the run."""

    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n]; NaN where it was not finite


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive lines of one phase."""

    name: str
    first_step: int
    last_step: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a policy did in an evaluation."""

    success_rate: float
    episodes: int
    interval: tuple[float, float]  # 95 %
    step: int | None = None  # of the policy
    mean_return: float | None = None
    mean_length: float | None = None
    lost_episodes: int = 0  # to crashes; they are not among `episodes`

    @property
    def counted(self) -> str:
        """The number of episodes, and why it is not the one that was asked for."""
        return f"{self.episodes} ({self.lost_episodes} lost)" if self.lost_episodes else str(self.episodes)


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """One episode of trouble."""

    kind: str
    step: int
    last_step: int | None  # None: it lasts
    severity: str
    message: str
    advice: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete one on disk."""

    step: int
    num_bytes: int
    modified: float  # seconds since 1970


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Everything that a report shows of one run."""

    directory: Path
    config: dict[str, Any]  # by dotted name
    preset_diff: dict[str, tuple[Any, Any]] | None  # (preset, run); None: there is no such preset
    series: dict[str, Series]
    phases: tuple[Phase, ...]
    summary: dict[str, Any]  # empty while the run is under way
    stages: dict[str, Outcome]
    evaluations: dict[int, dict[str, Any]]  # evaluation.json by step, in order
    anomalies: tuple[Anomaly, ...]
    checkpoints: tuple[Checkpoint, ...]
    profile: dict[str, Any] | None
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return run_name(self.directory, self.config)

    @property
    def last_step(self) -> int:
        return _last_step(self.series)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "under way or cut off: there is no summary.json"))

    @property
    def has_critic(self) -> bool:
        """Whether a critic was trained; without one a run is imitation."""
        return self.config.get("acrlpd.loss_weights.critic_weight") != 0

    @property
    def total_steps(self) -> int:
        offline, online = (self.config.get(f"training.{phase}_steps") or 0 for phase in ("offline", "online"))
        return offline + online


def run_name(directory: Path, config: Mapping[str, Any]) -> str:
    """config/exp_name, and for a baseline of a run its own name as well."""
    parts = [directory.name]
    if directory.parent.name == BASELINES:
        parts.insert(0, directory.parent.parent.name)
    return "/".join([str(config.get("name", directory.parent.name)), *parts])


def check_run_directory(directory: Path) -> Path:
    """The directory, if it is one and may hold a run; says what to give instead otherwise."""
    directory = directory.expanduser().absolute()
    if not directory.exists():
        raise RunError(f"there is no run in {directory}: no such directory")
    if not directory.is_dir():
        raise RunError(f"{directory} is a file; expected a run directory, <checkpoints>/<config>/<exp_name>")
    if (directory / "run" / "run.json").exists() and (directory.parent / CONFIG_FILE).exists():
        raise RunError(f"{directory} is a checkpoint; give its run: {directory.parent}")
    if not (directory / CONFIG_FILE).exists() and not (directory / METRICS_FILE).exists():
        below = sorted(path.parent for pattern in ("*", "*/*") for path in directory.glob(f"{pattern}/{CONFIG_FILE}"))
        if below:
            raise RunError(
                f"{directory} is not a run directory: it has no {CONFIG_FILE}; there are runs below it: "
                f"{', '.join(map(str, below[:5]))}"
            )
    return directory


def read_run(directory: Path) -> RunRecord:
    """Reads one run; raises `RunError` where there is none, or none that can be reported on."""
    directory = check_run_directory(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise RunError(f"{directory} is not a run directory: it has no {CONFIG_FILE}")
    config = read_config(directory)
    metrics = read_metric_lines(directory / METRICS_FILE)
    if not metrics.series:
        raise RunError(
            f"{directory} has no metrics yet: {METRICS_FILE} is missing or has no complete line; `acrlpd watch` "
            f"waits for the first"
        )
    summary = current_summary(directory, metrics.last_step)
    evaluations = _read_evaluations(directory / EVALUATIONS)
    return RunRecord(
        directory=directory,
        config=config,
        preset_diff=_preset_diff(config),
        series=metrics.series,
        phases=metrics.phases,
        summary=summary,
        stages=_stages(directory, summary),
        evaluations=evaluations,
        anomalies=read_anomalies(directory / ANOMALIES_FILE),
        checkpoints=tuple(_checkpoint(directory, step) for step in saved_steps(directory)),
        profile=_read_object(directory / PROFILE_FILE),
        problems=metrics.problems,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """The run's config by dotted names; fields of another version are no obstacle."""
    path = directory / CONFIG_FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} must hold the fields of a config; found {type(content).__name__}")
    return dict(flatten(content))


def _preset_diff(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    try:
        preset = dict(flatten(to_dict(get_config(str(config.get("name"))))))
    except ConfigError:
        return None
    names = [*preset, *(name for name in config if name not in preset)]
    return {
        name: (preset.get(name), config.get(name))
        for name in names
        if name not in _NOT_A_CHANGE and preset.get(name) != config.get(name)
    }


# -- metrics -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MetricLines:
    """All of a metrics.jsonl, by metric."""

    series: dict[str, Series]
    phases: tuple[Phase, ...]
    problems: tuple[str, ...]

    @property
    def last_step(self) -> int:
        return _last_step(self.series)


def _last_step(series: Mapping[str, Series]) -> int:
    return max(int(one.steps[-1]) for one in series.values())


def read_metric_lines(path: Path) -> MetricLines:
    """A last line that a kill cut off is left out; others that are not JSON are left out and counted."""
    columns: dict[str, tuple[array.array, array.array]] = {}
    phases: list[Phase] = []
    broken = 0
    for line in _complete_lines(path):
        parsed = parse_line(line)
        if parsed is None:
            broken += 1
            continue
        step = parsed["step"]
        for name, value in parsed.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                steps, values = columns.setdefault(name, (array.array("q"), array.array("d")))
                steps.append(step)
                values.append(math.nan if value is None or not math.isfinite(value) else value)
        if isinstance(phase := parsed.get("phase"), str):
            _extend_phases(phases, phase, step)
    problems = (f"{path.name}: {broken} lines are not JSON objects with a step, left out",) if broken else ()
    series = {name: Series(np.array(steps), np.array(values)) for name, (steps, values) in columns.items()}
    return MetricLines(series, tuple(phases), problems)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if it is not one."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and type(parsed.get("step")) is int else None


def _complete_lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n") and line.strip())


def _extend_phases(phases: list[Phase], name: str, step: int) -> None:
    if phases and phases[-1].name == name:
        phases[-1] = dataclasses.replace(phases[-1], last_step=step)
    else:
        phases.append(Phase(name, step, step))


# -- the other files ---------------------------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any] | None:
    """A file with one JSON object; None if it is not there."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}. Remove it, or take it from a backup") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: expected a JSON object, found {type(content).__name__}")
    return content


def current_summary(directory: Path, last_step: int) -> dict[str, Any]:
    """Empty if there is none, or if the run was resumed and went on to `last_step` after it was written."""
    summary = _read_object(directory / SUMMARY_FILE) or {}
    final = summary.get("final_step")
    return {} if type(final) is int and final < last_step else summary


def read_anomalies(path: Path) -> tuple[Anomaly, ...]:
    """In order of their beginning. A later line about the same trouble replaces the earlier one."""
    found: dict[tuple[str, int], Anomaly] = {}
    for line in _complete_lines(path):
        content = parse_line(line)
        if content is None:
            continue
        last = content.get("last_step")
        anomaly = Anomaly(
            kind=str(content.get("kind", "unknown")),
            step=content["step"],
            last_step=last if type(last) is int else None,
            severity="error" if content.get("severity") == "error" else "warning",
            message=str(content.get("message", "")),
            advice=str(content.get("advice", "")),
        )
        found[anomaly.kind, anomaly.step] = anomaly
    return tuple(sorted(found.values(), key=lambda anomaly: (anomaly.step, anomaly.kind)))


def _read_evaluations(directory: Path) -> dict[int, dict[str, Any]]:
    """By step, in order."""
    names = [path.parent.name for path in directory.glob(f"*/{EVALUATION_FILE}") if path.parent.name.isdigit()]
    found = {name: _read_object(directory / name / EVALUATION_FILE) for name in sorted(names, key=int)}
    return {int(name): content for name, content in found.items() if content is not None}


def _stages(directory: Path, summary: Mapping[str, Any]) -> dict[str, Outcome]:
    """The run's own table; until it is complete, with what the baselines have reached by themselves."""
    entries = dict(summary.get("evaluation") or {})
    for path in (directory / BASELINES).glob(f"*/{SUMMARY_FILE}"):
        reached = (_read_object(path) or {}).get("evaluation") or {}
        entries.setdefault(path.parent.name, reached.get("offline"))
    outcomes = {stage: read_outcome(entries[stage]) for stage in STAGES if stage in entries}
    return {stage: outcome for stage, outcome in outcomes.items() if outcome is not None}


def read_outcome(entry: Any) -> Outcome | None:
    """From an evaluation's JSON or the metrics of one; None if it has no success rate."""
    if not isinstance(entry, dict) or not isinstance(entry.get("success_rate"), int | float):
        return None
    interval = entry.get("interval")
    low, high = interval if isinstance(interval, list) and len(interval) == 2 else (0.0, 1.0)
    return Outcome(
        success_rate=float(entry["success_rate"]),
        episodes=int(entry.get("episodes") or 0),
        interval=(float(low), float(high)),
        step=entry.get("step"),
        mean_return=entry.get("mean_return", entry.get("episode_reward_mean")),
        mean_length=entry.get("mean_length", entry.get("episode_length_mean")),
        lost_episodes=int(entry.get("lost_episodes") or 0),
    )


def _checkpoint(directory: Path, step: int) -> Checkpoint:
    path = directory / str(step)
    return Checkpoint(step, sum(_sizes(path.rglob("*"))), path.stat().st_mtime)


def _sizes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        try:
            yield path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a running training removes old checkpoints
            yield 0
