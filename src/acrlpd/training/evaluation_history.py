"""What the evaluations of a run have found so far, and whether the policy still improves."""

from collections.abc import Mapping
from typing import Any


class EvaluationHistory:
    """The newest evaluation of each phase, the best evaluation of the run, and the evaluations since the best one."""

    def __init__(self, patience: int) -> None:
        """A phase ends after `patience` evaluations without a new best one; with 0 it never ends for this reason."""
        self.phases: dict[str, dict[str, Any]] = {}
        self.best: dict[str, float] | None = None  # step and score
        self._patience = patience
        self._without_improvement = 0

    def add(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        summary: dict[str, Any] = {"step": step} | dict(metrics)
        if "success_rate_low" in metrics:
            summary["interval"] = [summary.pop("success_rate_low"), summary.pop("success_rate_high")]
        self.phases[phase] = summary
        score = metrics.get("success_rate")  # This metric ranks policies, if an evaluation reports it.
        if score is None:
            return
        if self.best is None or score > self.best["score"]:
            self.best = {"step": step, "score": score}
            self._without_improvement = 0
        else:
            self._without_improvement += 1

    def begin_phase(self) -> None:
        """Each phase has its own patience."""
        self._without_improvement = 0

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self._patience <= self._without_improvement

    def has(self, phase: str, step: int) -> bool:
        """Whether the policy of this step has been evaluated."""
        return self.phases.get(phase, {}).get("step") == step

    def best_score(self, step: int) -> float | None:
        """The score of `step` if it is the best step so far, else None.

        Of several steps with an equal score only the first step gets the score, because Orbax would keep the last one.
        """
        return self.best["score"] if self.best is not None and self.best["step"] == step else None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "phases": self.phases, "without_improvement": self._without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.phases = state["best"], state["phases"]
        self._without_improvement = state["without_improvement"]
