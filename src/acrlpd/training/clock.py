"""Where the time of a run goes: waiting for data, updates, checkpoints, evaluation, rollouts."""

import contextlib
import time
from collections.abc import Iterator

import jax

_ACTIVITIES = ("data_wait", "checkpoint", "evaluation", "rollouts")


class Clock:
    """Adds up named activities; what is left over is the updates themselves."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys((*_ACTIVITIES, "step"), 0.0)
        self.restart()

    def restart(self) -> None:
        """Forgets the time and the steps since the last reading."""
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(_ACTIVITIES, 0.0)
        self._num_steps = 0

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(activity):  # how a profile tells them apart
                yield
        finally:
            self._spent[activity] += time.perf_counter() - start

    def count_step(self) -> None:
        self._num_steps += 1

    def read(self) -> dict[str, float]:
        """Since the last reading: the rate of updates, seconds per update of step and data wait, and
        seconds in all of the rest. Empty if there was no update.
        """
        if not self._num_steps:
            return {}
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        spent, num_steps = self._spent | {"step": elapsed - sum(self._spent.values())}, self._num_steps
        self._totals = {name: total + spent[name] for name, total in self._totals.items()}
        self.restart()
        return {
            "steps_per_s": num_steps / elapsed,
            "step_s": spent["step"] / num_steps,
            "data_wait_s": spent["data_wait"] / num_steps,
            "checkpoint_s": spent["checkpoint"],
            "evaluation_s": spent["evaluation"],
            "rollouts_s": spent["rollouts"],
        }

    def totals(self) -> dict[str, float]:
        """Seconds per activity in this process; of updates, up to the last reading."""
        return {name: round(total + self._spent.get(name, 0.0), 3) for name, total in self._totals.items()}
