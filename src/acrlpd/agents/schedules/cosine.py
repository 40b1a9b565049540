"""openpi's cosine schedule."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import optax
from annotated_types import Ge, Gt

from acrlpd.agents.schedules.base import LRSchedule, Schedule, check_warmup
from acrlpd.findings import Finding, error


@dataclasses.dataclass(frozen=True)
class CosineDecaySchedule(LRSchedule):
    """Linear warm-up to `peak_lr`, then half a cosine down to `decay_lr`, constant after that."""

    # Updates until the peak is reached. More: gentler start, needed when Adam's moments are cold.
    warmup_steps: Annotated[int, Ge(0)] = 1_000
    # Largest learning rate.
    peak_lr: Annotated[float, Gt(0)] = 2.5e-5
    # Update at which `decay_lr` is reached; includes the warm-up.
    decay_steps: int = 30_000
    # Learning rate at the end. Equal to `peak_lr`: constant after the warm-up.
    decay_lr: Annotated[float, Ge(0)] = 2.5e-6

    def create(self) -> Schedule:
        return optax.warmup_cosine_decay_schedule(
            init_value=self.peak_lr / (self.warmup_steps + 1),
            peak_value=self.peak_lr,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            end_value=self.decay_lr,
        )

    def check(self, name: str, num_train_steps: int) -> Iterator[Finding]:
        yield from check_warmup(name, self.warmup_steps, num_train_steps)
        if self.decay_steps <= self.warmup_steps:
            yield error(f"{name}.decay_steps {self.decay_steps} must exceed warmup_steps {self.warmup_steps}")
        if self.decay_lr > self.peak_lr:
            yield error(f"{name}.decay_lr {self.decay_lr} must lie between 0 and peak_lr {self.peak_lr}")

    def scaled_to(self, peak_lr: float) -> dict[str, float]:
        return {"peak_lr": peak_lr, "decay_lr": self.decay_lr * peak_lr / self.peak_lr}
