"""A constant learning rate."""

import dataclasses
from typing import Annotated

import optax
from annotated_types import Gt

from acrlpd.agents.schedules.base import LRSchedule, Schedule


@dataclasses.dataclass(frozen=True)
class ConstantSchedule(LRSchedule):
    """The same learning rate at every update."""

    # The learning rate.
    peak_lr: Annotated[float, Gt(0)] = 3e-4

    def create(self) -> Schedule:
        return optax.constant_schedule(self.peak_lr)
