"""Tells when a run goes wrong: once per episode of trouble, with numbers and advice."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from acrlpd.config import RLTrainConfig
from acrlpd.files import JsonLinesFile
from acrlpd.monitoring.anomaly_kinds import KINDS, MUCH_CLIPPED, AnomalyKind, Assessment, Component, UsualValues
from acrlpd.runs.record import Anomaly

logger = logging.getLogger(__name__)

# Below this share of the threshold a line is healthy.
_HEALTHY = 0.5
# Healthy lines in a row that end an episode: trouble that comes and goes is one episode.
_LINES_TO_RECOVER = 5


class AnomalyDetector:
    """Looks at every line of metrics; never touches the run.

    What the detector has learned, and the episodes that are open, are part of the run's state. A resumed run
    therefore reports the same as a run that was never interrupted, and reports nothing twice.
    """

    def __init__(self, rl_config: RLTrainConfig, path: pathlib.Path | None) -> None:
        """`path` is None on a process that watches but does not write."""
        self.open: dict[str, Anomaly] = {}
        self._rl_config = rl_config
        self._file = JsonLinesFile(path)
        self._usual = UsualValues()
        self._bad_lines: dict[str, int] = {}  # kind -> lines in a row
        self._healthy_lines: dict[str, int] = {}
        self._last_bad_step: dict[str, int] = {}

    def check(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Judges one line; returns the metrics to add to the line: 1 for every kind of trouble that lasts."""
        self._usual.enter(line)
        for kind in KINDS:
            assessment = kind.assess(line, self._usual, self._rl_config)
            if assessment is not None and self._usual.num_lines > kind.grace:
                self._judge(kind, assessment, line)
        self._usual.learn(line)
        return {kind.metric: 1.0 for kind in KINDS if kind.name in self.open}

    def _judge(self, kind: AnomalyKind, assessment: Assessment, line: Mapping[str, Any]) -> None:
        step, is_bad = int(line["step"]), assessment.excess > 1
        is_healthy = assessment.excess < _HEALTHY
        self._bad_lines[kind.name] = self._bad_lines.get(kind.name, 0) + 1 if is_bad else 0
        self._healthy_lines[kind.name] = self._healthy_lines.get(kind.name, 0) + 1 if is_healthy else 0
        if is_bad:
            self._last_bad_step[kind.name] = step
        if kind.name not in self.open:
            if self._bad_lines[kind.name] >= kind.patience:
                self._begin(kind, assessment, line)
        elif self._healthy_lines[kind.name] >= _LINES_TO_RECOVER:
            ended = dataclasses.replace(self.open.pop(kind.name), last_step=self._last_bad_step[kind.name])
            self._file.append(dataclasses.asdict(ended))
            logger.info("step %d: %s is over", step, kind.name)

    def _begin(self, kind: AnomalyKind, assessment: Assessment, line: Mapping[str, Any]) -> None:
        advice = kind.advice
        if assessment.component is not None:
            advice = f"{advice} {suggest_lr_adjustment(self._rl_config, assessment.component, line)}"
        anomaly = Anomaly(kind.name, int(line["step"]), None, kind.severity, assessment.message, advice)
        self.open[kind.name] = anomaly
        self._file.append(dataclasses.asdict(anomaly))
        logger.warning("step %d: %s: %s. %s", anomaly.step, anomaly.kind, anomaly.message, anomaly.advice)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on; survives JSON."""
        return {
            "usual": dataclasses.asdict(self._usual),
            "open": [dataclasses.asdict(anomaly) for anomaly in self.open.values()],
            "bad_lines": self._bad_lines,
            "healthy_lines": self._healthy_lines,
            "last_bad_step": self._last_bad_step,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Goes on after `step`, or starts anew with None; later reports of the interrupted run are dropped."""
        if state is not None:
            self._usual = UsualValues(**state["usual"])
            self.open = {entry["kind"]: Anomaly(**entry) for entry in state["open"]}
            self._bad_lines = dict(state["bad_lines"])
            self._healthy_lines = dict(state["healthy_lines"])
            self._last_bad_step = dict(state["last_bad_step"])
        kept = [entry for entry in self._file.read() if entry["step"] <= step and not self._is_open_again(entry)]
        self._file.replace(kept)  # even if all entries are kept: this removes a last line that a kill cut off

    def _is_open_again(self, entry: Mapping[str, Any]) -> bool:
        """Whether this entry ends an episode that is open at the step from which the run goes on."""
        anomaly = self.open.get(entry["kind"])
        return entry["last_step"] is not None and anomaly is not None and anomaly.step == entry["step"]


def suggest_lr_adjustment(rl_config: RLTrainConfig, component: Component, line: Mapping[str, Any]) -> str:
    """The learning rate to try when a component is in trouble, as a flag. Nothing is changed."""
    learner = "critic" if component in ("improvement", "backup") else component  # these learn as the critics do
    schedule, optimizer, flag = {
        "policy": (rl_config.actor_lr_schedule, rl_config.actor_optimizer, "--pi0_lr"),
        "critic": (rl_config.critic_lr_schedule, rl_config.critic_optimizer, "--critic_lr"),
        "temperature": (
            rl_config.temperature_lr_schedule,
            rl_config.temperature_optimizer,
            "--temperature_lr_schedule.peak_lr",
        ),
    }[learner]
    text = f"Half the {learner} learning rate is {flag} {schedule.peak_lr / 2:g}."
    norm, clip = line.get(f"{component}_grad_norm"), optimizer.clip_gradient_norm
    if norm is not None and norm > MUCH_CLIPPED * clip:
        text += f" Its gradient norm {norm:.4g} is clipped to {clip:g}, so a lower rate does more than harder clipping."
    return text
