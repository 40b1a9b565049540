"""What a chunk policy is, and what every way to execute its chunks has in common."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from acrlpd.choice import Choice
from acrlpd.findings import Finding, error

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """What a policy answers to n observations."""

    actions: np.ndarray  # float32 [n, T, a] in the environment's units
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [n], for the record
    noise: np.ndarray | None = None  # float32 [n, z] of which the chunks were made, if the training wants to know it


# (observations {column: [n, ...]}, prompts [n], seeds of the noise [n]) -> chunks. Each observation has a seed of its
# own, so that its noise does not depend on the observations that share the call.
ChunkPolicy = Callable[[Columns, Sequence[str], Sequence[int]], Chunks]


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one episode does until its policy is asked again."""

    actions: np.ndarray  # [k, a] to execute, with k of 1 or more
    values: dict[str, float]  # what the policy said about its answer
    left: Any = None  # what the next turn of this episode needs to know about this turn
    noise: np.ndarray | None = None  # [z] `Chunks.noise` of this episode


class ChunkExecution(Choice, abc.ABC):
    """How the chunks of a policy become the steps of an episode.

    An execution asks the policy itself, because some ways to execute a chunk need more of the policy than an answer:
    real-time chunking, for example, conditions the next chunk on what is left of the chunk before. An
    execution holds no state; `left` carries what an episode has to remember from turn to turn.
    """

    package = "acrlpd.execution"

    def for_horizon(self, chunk_length: int) -> Self:
        """This execution with everything filled in that follows from the length of the critics' chunks."""
        return self

    @property
    @abc.abstractmethod
    def replan_steps(self) -> int | None:
        """Steps from one answer of the policy to the next; None: all steps of a chunk."""

    @abc.abstractmethod
    def act(
        self,
        policy: ChunkPolicy,
        observations: Columns,
        prompts: Sequence[str],
        seeds: Sequence[int],
        left: Sequence[Any],
    ) -> list[Turn]:
        """The next turns of n episodes; `left` [n] is None for an episode that begins."""

    def check(self, action_horizon: int) -> Iterator[Finding]:
        """What is wrong with this execution of chunks of `action_horizon` steps."""
        steps = self.replan_steps
        if steps is not None and steps > action_horizon:
            yield error(
                f"env.execution asks the policy every {steps} steps, but a chunk of the policy has only "
                f"{action_horizon} steps (model.action_horizon); lower env.replan_steps"
            )
