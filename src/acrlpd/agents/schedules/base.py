"""What a learning-rate schedule is."""

import abc
from collections.abc import Callable, Iterator

import jax

from acrlpd.choice import Choice
from acrlpd.findings import Finding, warning

Schedule = Callable[[jax.Array], jax.Array]


class LRSchedule(Choice, abc.ABC):
    """A learning rate over the updates of one optimizer, which count from 0; updates that are skipped do not count."""

    package = "acrlpd.agents.schedules"

    # Largest learning rate. Every schedule has the field, so that one override fits all of them.
    peak_lr: float

    @abc.abstractmethod
    def create(self) -> Schedule:
        """A function from the number of updates so far to the learning rate of the next update."""

    def check(self, name: str, num_train_steps: int) -> Iterator[Finding]:
        """What is wrong with the schedule of a run of `num_train_steps` updates; `name` is its config section."""
        return iter(())

    def scaled_to(self, peak_lr: float) -> dict[str, float]:
        """The fields that change when the peak moves and the shape stays."""
        return {"peak_lr": peak_lr}


def check_warmup(name: str, warmup_steps: int, num_train_steps: int) -> Iterator[Finding]:
    if warmup_steps >= max(num_train_steps, 1):
        yield warning(f"{name}.warmup_steps {warmup_steps} does not end within the run of {num_train_steps} steps")
