"""What a run left in its directory: config, metrics, evaluations, anomalies, checkpoints.

The report and the live view read a run through this module. A run may be under way or cut off: a file that is
missing is left out, a file that cannot be read is an error that names the file, and lines that were left out are
counted in `problems`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from acrlpd.config import ConfigError, get_config, to_dict
from acrlpd.config.tree import flatten
from acrlpd.files import is_whole_number
from acrlpd.runs.checkpoint_layout import RUN, RUN_FILE
from acrlpd.runs.directory import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    RunError,
    read_run_file,
    read_summary,
    saved_steps,
)
from acrlpd.runs.metrics_log import MetricsReader, Phase, Series, parse_line

ANOMALIES_FILE = "anomalies.jsonl"
PROFILE_FILE = "profile.json"
EVALUATIONS = "evaluations"
EVALUATION_FILE = "evaluation.json"
VALIDATION_FILE = "validation.json"
BASELINES = "baselines"  # the runs that a run is compared with

# Stages of a run that are judged against each other, in the order of a table, with their titles.
STAGES = {
    "bc": "Imitation",
    "bc_success_only": "Imitation of the successes only",
    "offline": "Offline RL",
    "offline_success": "Offline RL, cloning successes",
    "offline_continued": "Offline RL, continued",
    "online": "Online RL",
}
# Fields of a config that do not change what is computed.
_NOT_A_CHANGE = ("name", "exp_name")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a policy did in an evaluation."""

    success_rate: float
    episodes: int
    interval: tuple[float, float]  # 95 %
    step: int | None = None  # of the policy
    mean_return: float | None = None
    mean_length: float | None = None
    lost_episodes: int = 0  # episodes lost to crashes; `episodes` does not count them

    @property
    def counted(self) -> str:
        """The number of episodes, and how many are missing from the number that was asked for."""
        return f"{self.episodes} ({self.lost_episodes} lost)" if self.lost_episodes else str(self.episodes)


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """One episode of trouble."""

    kind: str
    step: int
    last_step: int | None  # None: the trouble lasts
    severity: str
    message: str
    advice: str


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """What the live view shows of a run; cheap to read again every second."""

    directory: Path
    config: dict[str, Any]  # by dotted name; empty before the run has written its config
    series: dict[str, Series]
    phases: tuple[Phase, ...]
    summary: dict[str, Any]  # empty while the run is under way
    anomalies: tuple[Anomaly, ...]
    saved_steps: tuple[int, ...]
    metrics_written: float | None  # seconds since 1970; None before the first metrics
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """config/exp_name, and for a baseline of a run its own name as well."""
        parts = [self.directory.name]
        if self.directory.parent.name == BASELINES:
            parts.insert(0, self.directory.parent.parent.name)
        return "/".join([str(self.config.get("name", self.directory.parent.name)), *parts])

    @property
    def last_step(self) -> int:
        return max((int(one.steps[-1]) for one in self.series.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """The length that the config asks for; None where the config is not known."""
        offline, online = (self.config.get(f"training.{phase}_steps") for phase in ("offline", "online"))
        return None if offline is None else offline + (online or 0)

    def latest(self, name: str) -> float | None:
        """The newest value of a metric; None where there is no value, or where it is not finite."""
        series = self.series.get(name)
        return None if series is None or math.isnan(series.values[-1]) else float(series.values[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord(RunProgress):
    """Everything that a report shows of one run."""

    config_text: str  # config.yaml as it is
    preset_diff: dict[str, tuple[Any, Any]] | None  # (preset, run); None: there is no such preset
    stages: dict[str, Outcome]
    evaluations: dict[int, dict[str, Any]]  # evaluation.json by step, in order
    validation: tuple[int, dict[str, Any]] | None  # the newest validation.json with its step
    checkpoints: dict[int, tuple[int, float]]  # step -> bytes on disk, seconds since 1970
    profile: dict[str, Any] | None

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "under way or cut off: there is no summary.json"))

    @property
    def has_critic(self) -> bool:
        """Whether a critic was trained."""
        return self.config.get("acrlpd.loss_weights.critic_weight") != 0

    @property
    def is_imitation(self) -> bool:
        """Whether the policy only clones: there is neither a critic nor an improvement that needs no critic."""
        return not self.has_critic and self.config.get("acrlpd.loss_weights.actor_weight") == 0


class RunReader:
    """Reads one run again and again; of the metrics only what was added since the last time."""

    def __init__(self, directory: Path) -> None:
        self.directory = check_run_directory(directory)
        self._metrics = MetricsReader(self.directory / METRICS_FILE)

    def read(self) -> RunProgress:
        self._metrics.read()
        metrics, path = self._metrics, self.directory / METRICS_FILE
        problem = f"{path.name}: {metrics.num_broken} lines are not JSON objects with a step and were left out"
        progress = RunProgress(
            directory=self.directory,
            config=_read_config(self.directory / CONFIG_FILE),
            series=metrics.series,
            phases=tuple(metrics.phases),
            summary=read_summary(self.directory),
            anomalies=_read_anomalies(self.directory / ANOMALIES_FILE),
            saved_steps=tuple(saved_steps(self.directory)),
            metrics_written=path.stat().st_mtime if metrics.series else None,
            problems=(problem,) if metrics.num_broken else (),
        )
        final = progress.summary.get("final_step")
        has_gone_on = type(final) is int and final < progress.last_step  # the run was resumed after its summary
        return dataclasses.replace(progress, summary={}) if has_gone_on else progress


def read_run(directory: Path) -> RunRecord:
    """Reads a whole run; raises `RunError` where there is no run, or nothing to report of it."""
    progress = RunReader(directory).read()
    directory = progress.directory
    if not progress.config:
        raise RunError(f"{directory} is not a run directory: it has no {CONFIG_FILE}")
    if not progress.series:
        raise RunError(
            f"{directory} has no metrics yet: {METRICS_FILE} is missing or has no complete line; `acrlpd watch` "
            f"waits for the first line"
        )
    return RunRecord(
        **vars(progress),
        config_text=(directory / CONFIG_FILE).read_text(encoding="utf-8"),
        preset_diff=_preset_diff(progress.config),
        stages=_read_stages(directory, progress.summary),
        evaluations=_read_evaluations(directory / EVALUATIONS),
        validation=_read_newest_validation(directory / EVALUATIONS),
        checkpoints=_read_checkpoints(directory, progress.saved_steps),
        profile=read_run_file(directory / PROFILE_FILE),
    )


def check_run_directory(directory: Path) -> Path:
    """The directory, if it may hold a run; otherwise an error says what to give instead."""
    directory = directory.expanduser().absolute()
    if not directory.exists():
        raise RunError(f"there is no run in {directory}: no such directory")
    if not directory.is_dir():
        raise RunError(f"{directory} is a file; expected a run directory, <checkpoints>/<config>/<exp_name>")
    if (directory / RUN / RUN_FILE).exists() and (directory.parent / CONFIG_FILE).exists():
        raise RunError(f"{directory} is a checkpoint; give its run: {directory.parent}")
    if not (directory / CONFIG_FILE).exists() and not (directory / METRICS_FILE).exists():
        below = sorted(path.parent for pattern in ("*", "*/*") for path in directory.glob(f"{pattern}/{CONFIG_FILE}"))
        if below:
            raise RunError(
                f"{directory} is not a run directory: it has no {CONFIG_FILE}; there are runs below it: "
                f"{', '.join(map(str, below[:5]))}"
            )
    return directory


def running_baseline(directory: Path) -> str | None:
    """The baseline that trains before the run itself, if there is one under way."""
    started = (path.parent for path in directory.glob(f"{BASELINES}/*/{METRICS_FILE}"))
    return next((baseline.name for baseline in started if not (baseline / SUMMARY_FILE).is_file()), None)


def read_outcome(entry: Mapping[str, Any] | None) -> Outcome | None:
    """From an evaluation's JSON or its metrics; None if there is no success rate."""
    if entry is None or entry.get("success_rate") is None:
        return None
    low, high = entry.get("interval") or (0.0, 1.0)
    return Outcome(
        success_rate=float(entry["success_rate"]),
        episodes=int(entry.get("episodes") or 0),
        interval=(float(low), float(high)),
        step=entry.get("step"),
        mean_return=entry.get("mean_return", entry.get("episode_reward_mean")),
        mean_length=entry.get("mean_length", entry.get("episode_length_mean")),
        lost_episodes=int(entry.get("lost_episodes") or 0),
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The run's config by dotted names; empty if there is none yet."""
    if not path.is_file():
        return {}
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
    return {
        name: (preset.get(name), config.get(name))
        for name in dict.fromkeys([*preset, *config])
        if name not in _NOT_A_CHANGE and preset.get(name) != config.get(name)
    }


def _read_anomalies(path: Path) -> tuple[Anomaly, ...]:
    """In the order of their beginning. A later line about the same trouble replaces the earlier line."""
    fields = {field.name for field in dataclasses.fields(Anomaly)}
    found: dict[tuple[str, int], Anomaly] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        content = parse_line(line)
        if content is not None and content.keys() == fields:
            anomaly = Anomaly(**content)
            found[anomaly.kind, anomaly.step] = anomaly
    return tuple(sorted(found.values(), key=lambda anomaly: (anomaly.step, anomaly.kind)))


def _read_evaluations(directory: Path) -> dict[int, dict[str, Any]]:
    """By step, in order."""
    found = {
        step: read_run_file(directory / str(step) / EVALUATION_FILE) for step in _steps(directory, EVALUATION_FILE)
    }
    return {step: content for step, content in found.items() if content is not None}


def _read_newest_validation(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """The other validations are in the metrics as well."""
    for step in reversed(_steps(directory, VALIDATION_FILE)):
        if (content := read_run_file(directory / str(step) / VALIDATION_FILE)) is not None:
            return step, content
    return None


def _steps(directory: Path, file: str) -> list[int]:
    """The steps that have this file, in order."""
    return sorted(int(p.parent.name) for p in directory.glob(f"*/{file}") if is_whole_number(p.parent.name))


def _read_stages(directory: Path, summary: Mapping[str, Any]) -> dict[str, Outcome]:
    """The run's own table; until the table is complete, also what the baselines have reached by themselves."""
    entries = dict(summary.get("evaluation") or {})
    for path in (directory / BASELINES).glob(f"*/{SUMMARY_FILE}"):
        reached = (read_run_file(path) or {}).get("evaluation") or {}
        entries.setdefault(path.parent.name, reached.get("offline"))
    outcomes = {stage: read_outcome(entries[stage]) for stage in STAGES if stage in entries}
    return {stage: outcome for stage, outcome in outcomes.items() if outcome is not None}


def _read_checkpoints(directory: Path, steps: Iterable[int]) -> dict[int, tuple[int, float]]:
    """Their bytes on disk, and when they were written. A training that runs removes old checkpoints meanwhile."""
    found = {}
    for step in steps:
        with contextlib.suppress(FileNotFoundError):
            path = directory / str(step)
            num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found[step] = num_bytes, path.stat().st_mtime
    return found
