"""What the evaluations of a run have found so far, and when nothing improves any more."""

from collections.abc import Mapping
from typing import Any

from acrlpd.training.comparison import evaluation_summary

# What an evaluation is judged by, if it reports it; higher is better.
SCORE_METRIC = "success_rate"


class EvaluationRecord:
    """The last evaluation of each phase (in the end that of its end), the best of all, and how long ago it was."""

    def __init__(self, patience: int) -> None:
        """`patience` evaluations without a better one end a phase; 0: never."""
        self.phases: dict[str, dict[str, Any]] = {}
        self.best: dict[str, float] | None = None  # step and score
        self._patience = patience
        self._without_improvement = 0

    def add(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        self.phases[phase] = evaluation_summary(step, metrics)
        score = metrics.get(SCORE_METRIC)
        if score is None:
            return
        if self.best is None or score > self.best["score"]:
            self.best = {"step": step, "score": score}
            self._without_improvement = 0
        else:
            self._without_improvement += 1

    def begin_phase(self) -> None:
        """Patience is per phase."""
        self._without_improvement = 0

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self._patience <= self._without_improvement

    def is_of(self, phase: str, step: int) -> bool:
        """Whether the policy of this step has been judged."""
        return self.phases.get(phase, {}).get("step") == step

    def best_score(self, step: int) -> float | None:
        """The score of a step if it is the best so far; of equal ones orbax would keep the latest, not the first."""
        return self.best["score"] if self.best is not None and self.best["step"] == step else None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "phases": self.phases, "without_improvement": self._without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.phases = state["best"], state["phases"]
        self._without_improvement = state["without_improvement"]
