"""What makes one evaluation better than another: `evaluation.score`.

A score is the name of one metric, or a weighted sum such as "success + 0.01*reward". Whether more or less of a metric
is better is known here, so weights are positive.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from acrlpd.choice import hint

SUCCESS, VALIDATION_LOSS = "success", "validation_loss"
_REWARD = "reward"


@dataclasses.dataclass(frozen=True)
class ScoredMetric:
    """A metric that a score may have."""

    metric: str  # its name in the metrics of an evaluation
    title: str
    sign: float = 1.0  # -1: less is better
    needs_env: bool = True  # or else held-out episodes


METRICS = {
    SUCCESS: ScoredMetric("success_rate", "success"),
    _REWARD: ScoredMetric("episode_reward_mean", "reward"),
    "length": ScoredMetric("episode_length_mean", "episode length", sign=-1.0),
    VALIDATION_LOSS: ScoredMetric("validation/flow_loss", "held-out loss", sign=-1.0, needs_env=False),
    "action_error": ScoredMetric(
        "validation/relative_action_error", "held-out action error", sign=-1.0, needs_env=False
    ),
}
_TERM = re.compile(r"(?:(?P<weight>[0-9.]+(?:e-?[0-9]+)?)\s*\*\s*)?(?P<name>\w+)")


@dataclasses.dataclass(frozen=True)
class Rating:
    """How good an evaluation is by a score."""

    by: str  # the score, as in the config
    value: float  # as a person reads it
    order: tuple[float, ...]  # higher is better; the second number decides between equal first numbers


@dataclasses.dataclass(frozen=True)
class Score:
    """One metric, or several with their weights."""

    text: str
    weights: Mapping[str, float]  # of names in METRICS

    def rate(self, metrics: Mapping[str, float]) -> Rating | None:
        """The rating of an evaluation; None if the evaluation lacks a metric.

        By success alone, equal success is decided by reward. A run without an environment has no success, and is rated
        by its held-out loss.
        """
        if self.text == SUCCESS and METRICS[SUCCESS].metric not in metrics:
            return parse_score(VALIDATION_LOSS).rate(metrics)
        if any(METRICS[name].metric not in metrics for name in self.weights):
            return None
        signed = sum(
            weight * METRICS[name].sign * metrics[METRICS[name].metric] for name, weight in self.weights.items()
        )
        if self.text == SUCCESS:
            return Rating(self.text, signed, (signed, metrics.get(METRICS[_REWARD].metric, 0.0)))
        [first, *others] = self.weights
        return Rating(self.text, signed if others else METRICS[first].sign * signed, (signed,))


def parse_score(text: str) -> Score:
    """The score that a text says; raises ValueError if it says none."""
    weights: dict[str, float] = {}
    for part in text.split("+"):
        term = _TERM.fullmatch(part.strip())
        name = part.strip() if term is None else term["name"]
        if term is None or name not in METRICS:
            raise ValueError(
                f"evaluation.score: {name!r} is no metric{hint(name, METRICS)}; expected {', '.join(METRICS)}, or a "
                'weighted sum of them such as "success + 0.01*reward"'
            )
        weight = float(term["weight"] or 1.0)
        if not 0 < weight < math.inf:
            raise ValueError(f"evaluation.score: the weight of {name} must be positive; found {term['weight']}")
        if name in weights:
            raise ValueError(f"evaluation.score names {name} twice")
        weights[name] = weight
    single = next(iter(weights)) if len(weights) == 1 else None
    return Score(text if single is None else single, {single: 1.0} if single is not None else weights)
