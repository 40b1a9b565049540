"""Faults that benchmarks/regress.py injects as a user's own improvements, named module:Name in a scenario."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from acrlpd.agents.improvements.awr import AWR


@dataclasses.dataclass(frozen=True)
class FlippedSign(AWR):
    """Clones what the critics find worse. Its metrics report the true advantage, so they do not give the fault away."""

    def balance(self, weights: Any) -> Any:
        advantage = weights.kept["advantage"]
        flipped = super().balance(dataclasses.replace(weights, kept={"advantage": -advantage}))
        return dataclasses.replace(flipped, kept={"advantage": advantage})


@dataclasses.dataclass(frozen=True)
class BusyHost(AWR):
    """Keeps a core busy in every update without a matrix product, so that only processor time shows the fault."""

    # Processor time that an update loses.
    busy_ms: float = 1.0

    def weigh(self, view: Any) -> Any:
        weights = super().weigh(view)

        def wait(size: jax.Array) -> np.ndarray:
            end = time.thread_time() + self.busy_ms / 1_000
            while time.thread_time() < end:
                pass
            return np.asarray(size)

        shape = jax.ShapeDtypeStruct(weights.size.shape, weights.size.dtype)
        return dataclasses.replace(weights, size=jax.pure_callback(wait, shape, weights.size))
