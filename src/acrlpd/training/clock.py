"""Where the time of a run goes: waiting for data, updates, checkpoints, evaluation."""

import contextlib
import time
from collections.abc import Iterator

ACTIVITIES = ("data_wait", "checkpoint", "evaluation")


class Clock:
    """Adds up named activities between two readings; what is left over is the updates themselves."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[activity] += time.perf_counter() - start

    def read(self, num_steps: int) -> dict[str, float]:
        """Seconds since the last reading, per update where that makes sense, and the rate of updates."""
        now = time.perf_counter()
        elapsed = max(now - self._start, 1e-9)
        spent, self._start = self._spent, now
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        updates = max(elapsed - sum(spent.values()), 1e-9)
        return {
            "steps_per_s": num_steps / elapsed,
            "step_s": updates / num_steps,
            "data_wait_s": spent["data_wait"] / num_steps,
            "checkpoint_s": spent["checkpoint"],
            "evaluation_s": spent["evaluation"],
        }
