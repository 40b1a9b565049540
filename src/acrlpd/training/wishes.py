"""What a run cannot do alone, because several runs may do it together: updates, evaluations and rounds of episodes.

A trainer yields wishes, and the driver (`drive.py`) fulfils them for all runs at once.
"""

import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

from acrlpd.agents import MetricsTable


@dataclasses.dataclass(frozen=True)
class Updates:
    """The next updates of the agent, in one call. The answer is `Made`."""

    num_updates: int  # at most
    update_policy: bool  # whether the warm-up of the critics is over


@dataclasses.dataclass(frozen=True)
class Made:
    """The updates that were started."""

    num_updates: int
    metrics: MetricsTable  # of all runs in the call
    has_compiled: bool  # whether the train step was compiled before the call; its time then says nothing


@dataclasses.dataclass(frozen=True)
class NextEvaluation:
    """An evaluation of the agent. The answer is the metrics that it has found."""


@dataclasses.dataclass(frozen=True)
class NextRound:
    """A round of episodes. The answer is the `Round`, or None if the run has to stop before the round."""

    number: int


Wish = Updates | NextEvaluation | NextRound
Wishes = Generator[Wish, Any, None]
EvaluationMetrics = Mapping[str, float]
