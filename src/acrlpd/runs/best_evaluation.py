"""The best evaluation of a run so far, and in words what it is the best by."""

import math
from collections.abc import Mapping
from typing import Any

from acrlpd.config.score import METRICS, SUCCESS, Score, parse_score
from acrlpd.runs.metrics_log import EVALUATION, Series
from acrlpd.units import format_percent


class BestEvaluation:
    """Finds the best of the evaluations that are added in order; of equal ones the first is the best."""

    def __init__(self, score: Score) -> None:
        self.found: dict[str, Any] | None = None  # step, score, and what the score is by
        self.rank = 0  # how many evaluations were the best of their time
        self._score = score
        self._order: tuple[float, ...] = ()

    def add(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Whether this evaluation is better than all before; None if it cannot be rated.

        Ratings by different things are not compared: a run that had no success to go by, and has one now, begins anew.
        """
        rating = self._score.rate(metrics)
        if rating is None:
            return None
        is_first = self.found is None
        if self.found is not None and rating.by != self.found["by"]:
            if rating.by != self._score.text:
                return None
            is_first = True
        is_better = is_first or rating.order > self._order
        if not is_better or not all(map(math.isfinite, rating.order)):
            return False
        self.found = {"step": step, "score": rating.value, "by": rating.by}
        self._order = rating.order
        self.rank += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.found, "order": list(self._order), "rank": self.rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also takes the state of a run from the time when success alone counted, and the first of equals stayed."""
        self.found = None if state["best"] is None else {"by": SUCCESS} | state["best"]
        before = () if self.found is None else (self.found["score"], math.inf)
        self._order = tuple(state.get("order", before))
        self.rank = state.get("rank", 0 if self.found is None else 1)


def find_best(series: Mapping[str, Series], score: str) -> dict[str, Any] | None:
    """The best evaluation among the metrics of a run that may be under way."""
    metrics: dict[int, dict[str, float]] = {}
    for known in METRICS.values():
        name = f"{EVALUATION}{known.metric}" if known.needs_env else known.metric
        one = series.get(name)
        for step, value in () if one is None else zip(one.steps.tolist(), one.values.tolist(), strict=True):
            metrics.setdefault(step, {})[known.metric] = value
    best = BestEvaluation(parse_score(score))
    for step in sorted(metrics):
        best.add(step, metrics[step])
    return best.found


def describe_best(best: Mapping[str, Any]) -> str:
    """The step, and what it is the best by; without a reason, the step is that of the highest success."""
    by, score = best.get("by", SUCCESS), best["score"]
    title = METRICS[by].title if by in METRICS else by
    value = format_percent(score) if by == SUCCESS else f"{score:.4g}"
    return f"step {best['step']:,} by {title} ({value})"
