"""What the evaluations of a run have found so far, and whether the policy still improves."""

from collections.abc import Mapping
from typing import Any

from acrlpd.config.score import parse_score
from acrlpd.runs.best_evaluation import BestEvaluation


class EvaluationHistory:
    """The newest evaluation of each phase, the best evaluation of the run, and the evaluations since the best one."""

    def __init__(self, patience: int, score: str) -> None:
        """A phase ends after `patience` evaluations without a new best one; with 0 it never ends for this reason.

        `score` says what makes an evaluation the best (`evaluation.score`).
        """
        self.phases: dict[str, dict[str, Any]] = {}
        self._best = BestEvaluation(parse_score(score))
        self._patience = patience
        self._without_improvement = 0

    @property
    def best(self) -> dict[str, Any] | None:
        """Step and score of the best evaluation, and what the score is by."""
        return self._best.found

    def add(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        summary: dict[str, Any] = {"step": step} | dict(metrics)
        if "success_rate_low" in metrics:
            summary["interval"] = [summary.pop("success_rate_low"), summary.pop("success_rate_high")]
        self.phases[phase] = summary
        is_better = self._best.add(step, metrics)
        if is_better is not None:
            self._without_improvement = 0 if is_better else self._without_improvement + 1

    def begin_phase(self) -> None:
        """Each phase has its own patience."""
        self._without_improvement = 0

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self._patience <= self._without_improvement

    def has(self, phase: str, step: int) -> bool:
        """Whether the policy of this step has been evaluated."""
        return self.phases.get(phase, {}).get("step") == step

    def best_rank(self, step: int) -> float | None:
        """A number for `step` if it is the best step so far, else None; the number of every later best step is higher.

        Orbax keeps the checkpoint with the highest number, whatever the evaluations were judged by. Runs from before
        there were ranks stored success rates, which are at most 1. Their next best step has rank 2.
        """
        return float(self._best.rank) if self.best is not None and self.best["step"] == step else None

    def state_dict(self) -> dict[str, Any]:
        own = {"phases": self.phases, "without_improvement": self._without_improvement}
        return self._best.state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best.load_state_dict(state)
        self.phases = state["phases"]
        self._without_improvement = state["without_improvement"]
