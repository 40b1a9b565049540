"""An execution of our own: temporal ensembling, as a user would write it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from acrlpd.execution.base import ChunkExecution, ChunkPolicy, Columns, Turn


@dataclasses.dataclass(frozen=True)
class TemporalEnsembling(ChunkExecution):
    """Asks the policy at every step and executes the weighted mean of all chunks that say something about the step."""

    # Weight of a chunk against the one that is a step newer. Larger: smoother, slower to react.
    decay: float = 0.5

    @property
    def replan_steps(self) -> int:
        return 1

    def act(
        self,
        policy: ChunkPolicy,
        observations: Columns,
        prompts: Sequence[str],
        seeds: Sequence[int],
        left: Sequence[Any],
    ) -> list[Turn]:
        chunks = policy(observations, prompts, seeds)
        turns = []
        for row, chunk in enumerate(chunks.actions):
            before = [old[1:] for old in left[row] or () if len(old) > 1]  # newest first, a step further on
            said = [chunk, *before]
            weights = self.decay ** np.arange(len(said), dtype=np.float32)
            mean = np.average([one[0] for one in said], axis=0, weights=weights).astype(np.float32)
            values = {name: float(value[row]) for name, value in chunks.values.items()}
            turns.append(Turn(mean[None], values, left=said))
        return turns
