"""What is usual for a run, learned from the run's own lines of metrics: running means and the range of rewards."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

# Lines after which a usual value is known.
_LINES_TO_LEARN = 5
# Share of a new line in the usual value. A line that is out of the ordinary counts less: trouble must not pass for
# normal at once, but a run that has changed for good is believed in the end.
_RATE, _SLOW_RATE = 0.1, 0.02
_OUT_OF_THE_ORDINARY = 3.0

LOSSES = ("critic_loss", "bc_loss", "actor_loss")
UPDATE_TIME = "update_time"


@dataclasses.dataclass
class UsualValues:
    """Running estimates of one run; all of them survive JSON exactly."""

    phase: str | None = None
    num_lines: int = 0  # in this phase
    reward_min: float = 0.0
    reward_max: float = 0.0
    # Name -> logarithm of the usual value, and the number of lines that it comes from.
    log_usual: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    def enter(self, line: Mapping[str, Any]) -> None:
        """Takes phase and rewards of a line that is about to be judged; a new phase forgets what was usual."""
        if line.get("phase") != self.phase:
            self.phase, self.num_lines, self.log_usual = line.get("phase"), 0, {}
        self.num_lines += 1
        self.reward_min = min(self.reward_min, line.get("reward_min") or 0.0)
        self.reward_max = max(self.reward_max, line.get("reward_max") or 0.0)

    def learn(self, line: Mapping[str, Any]) -> None:
        """Adds the losses and the update time of a line that has been judged."""
        for name in LOSSES:
            self._learn(name, line.get(name))
        self._learn(UPDATE_TIME, update_time(line))

    def _learn(self, name: str, value: float | None) -> None:
        if value is None or value <= 0:
            return
        log_value = math.log(value)
        mean, count = self.log_usual.get(name, (log_value, 0))
        if count < _LINES_TO_LEARN:
            rate = 1 / (count + 1)
        else:
            rate = _RATE if abs(log_value - mean) < math.log(_OUT_OF_THE_ORDINARY) else _SLOW_RATE
        self.log_usual[name] = (mean + rate * (log_value - mean), count + 1)

    def usual(self, name: str) -> float | None:
        """The usual value (a geometric mean); None before there were enough lines."""
        mean, count = self.log_usual.get(name, (0.0, 0))
        return math.exp(mean) if count >= _LINES_TO_LEARN else None

    @property
    def reward_scale(self) -> float:
        """Size of the largest reward so far; 1 where all rewards were 0."""
        return max(abs(self.reward_min), abs(self.reward_max)) or 1.0


def update_time(line: Mapping[str, Any]) -> float | None:
    """Seconds per update, with the wait for its data, without checkpoints and evaluations."""
    step, wait = line.get("timing/step_s"), line.get("timing/data_wait_s")
    return None if step is None or wait is None else step + wait
