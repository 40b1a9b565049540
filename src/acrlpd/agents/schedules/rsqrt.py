"""openpi's inverse square root schedule."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt

from acrlpd.agents.schedules.base import LRSchedule, Schedule, check_warmup
from acrlpd.findings import Finding


@dataclasses.dataclass(frozen=True)
class RsqrtDecaySchedule(LRSchedule):
    """Linear warm-up to `peak_lr`, then inverse square root decay without an end."""

    # Updates until the peak is reached.
    warmup_steps: Annotated[int, Ge(0)] = 1_000
    # Largest learning rate.
    peak_lr: Annotated[float, Gt(0)] = 5e-5
    # The rate has fallen to peak / sqrt(2) this many updates after the warm-up. Larger: slower decay.
    timescale: Annotated[float, Gt(0)] = 10_000.0

    def create(self) -> Schedule:
        warmup = optax.linear_schedule(self.peak_lr / (self.warmup_steps + 1), self.peak_lr, self.warmup_steps)

        def rsqrt(count: jax.Array) -> jax.Array:
            return self.peak_lr / jnp.sqrt((self.timescale + count) / self.timescale)

        return optax.join_schedules([warmup, rsqrt], [self.warmup_steps])

    def check(self, name: str, num_train_steps: int) -> Iterator[Finding]:
        yield from check_warmup(name, self.warmup_steps, num_train_steps)
