"""Open loop: the first steps of every chunk, without looking at what they lead to."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge

from acrlpd.execution.base import ChunkExecution, ChunkPolicy, Columns, Turn


@dataclasses.dataclass(frozen=True)
class OpenLoop(ChunkExecution):
    """Executes the first `steps` steps of every chunk, then asks the policy again."""

    # Steps of a chunk that are executed; None: those that the critics see (qchunking).
    steps: Annotated[int | None, Ge(1)] = None

    def for_horizon(self, chunk_length: int) -> "OpenLoop":
        return OpenLoop(chunk_length) if self.steps is None else self

    @property
    def replan_steps(self) -> int | None:
        return self.steps

    def act(
        self,
        policy: ChunkPolicy,
        observations: Columns,
        prompts: Sequence[str],
        seeds: Sequence[int],
        left: Sequence[Any],
    ) -> list[Turn]:
        chunks = policy(observations, prompts, seeds)
        return [
            Turn(
                actions[: self.steps],
                {name: float(values[row]) for name, values in chunks.values.items()},
                noise=None if chunks.noise is None else chunks.noise[row],
            )
            for row, actions in enumerate(chunks.actions)
        ]
