"""What makes an evaluation the best: success, reward, a weighted sum, or the held-out loss."""

import json
import logging
import math
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import metrics_of, state_config, train_here

from acrlpd.config.score import parse_score
from acrlpd.config.validation import validate_config
from acrlpd.monitoring.report import generate_training_report
from acrlpd.runs.best_evaluation import describe_best, find_best
from acrlpd.runs.directory import read_summary, run_directory, saved_steps
from acrlpd.runs.record import RunReader
from acrlpd.training.evaluation_history import EvaluationHistory

Evaluation = tuple[float, float]  # success and reward


def history_of(score: str, evaluations: list[dict[str, float]], patience: int = 0) -> EvaluationHistory:
    """The history after evaluations at steps 1, 2, ...; after each of them the run is killed and resumed."""
    history = EvaluationHistory(patience, score)
    for step, metrics in enumerate(evaluations, 1):
        history.add("offline", step, metrics)
        state = json.loads(json.dumps(history.state_dict()))
        history = EvaluationHistory(patience, score)
        history.load_state_dict(state)
    return history


def played(success: float, reward: float) -> dict[str, float]:
    return {"success_rate": success, "episode_reward_mean": reward, "validation/flow_loss": 1.0 - success}


outcomes = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([-1.0, 0.0, 2.0]))


@given(st.lists(outcomes, min_size=1, max_size=8))
def test_the_best_is_that_of_a_sort(evaluations: list[Evaluation]) -> None:
    metrics = [played(*evaluation) for evaluation in evaluations]
    keys: dict[str, Any] = {
        "success": lambda evaluation: evaluation,  # equal success is decided by reward
        "reward": lambda evaluation: evaluation[1],
        "2*success + 0.5*reward": lambda evaluation: 2 * evaluation[0] + 0.5 * evaluation[1],
        "validation_loss": lambda evaluation: evaluation[0],
    }
    for score, key in keys.items():
        best = history_of(score, metrics).best
        first_of_best = max(range(len(evaluations)), key=lambda i: (key(evaluations[i]), -i))
        assert best is not None and (best["step"], best["by"]) == (first_of_best + 1, score)


def test_equal_success_with_more_reward_is_an_improvement() -> None:
    history = history_of("success", [played(0.5, 1.0), played(0.5, 1.0)], patience=1)
    assert history.is_out_of_patience and history.best_rank(1) == 1.0
    better = history_of("success", [played(0.5, 1.0), played(0.5, 1.5)], patience=1)
    assert not better.is_out_of_patience
    # Orbax keeps the highest number, and the success of both is the same.
    assert better.best_rank(2) == 2.0 and better.best_rank(1) is None


def test_what_cannot_be_compared_does_not_replace_the_best() -> None:
    """A run without an environment goes by its held-out loss; later it has one, whose first success is not finite."""
    evaluations = [{"validation/flow_loss": 0.5}, played(math.nan, 0.0), played(0.25, 0.0)]
    history = history_of("success", evaluations[:2])
    assert history.best is not None and (history.best["step"], history.best["by"]) == (1, "validation_loss")
    best = history_of("success", evaluations).best
    assert best is not None and (best["step"], best["by"]) == (3, "success")


def test_a_run_from_before_there_was_a_score_goes_on() -> None:
    history = EvaluationHistory(2, "success")
    history.load_state_dict({"best": {"step": 1, "score": 0.5}, "phases": {}, "without_improvement": 1})
    history.add("offline", 2, played(0.5, 100.0))  # the first of equals stays, as it did then
    assert history.best == {"step": 1, "score": 0.5, "by": "success"} and history.is_out_of_patience
    history.add("offline", 3, played(0.6, 0.0))
    assert history.best_rank(3) > 0.5  # above the number that the checkpoint of step 1 has on disk


def test_what_cannot_be_rated_changes_nothing() -> None:
    history = history_of("success", [played(0.5, 1.0), {"validation/flow_loss": 0.0}], patience=1)
    assert history.best["step"] == 1 and not history.is_out_of_patience
    history.add("offline", 3, {"success_rate": float("nan")})
    assert history.best["step"] == 1 and history.is_out_of_patience


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("sucess", "'sucess' is no metric; did you mean 'success'?"),
        ("success + -1*reward", "'-1*reward' is no metric"),
        ("0*reward", "the weight of reward must be positive; found 0"),
        ("reward + reward", "names reward twice"),
        ("reward", "names reward, which needs an environment"),
        ("success + validation_loss", "names validation_loss, which needs held-out episodes"),
    ],
)
def test_a_score_that_cannot_be_computed_is_refused(tmp_path: pathlib.Path, score: str, message: str) -> None:
    config = state_config(tmp_path, evaluation__score=score, data__validation_share=0.0)
    assert any(message in error for error in validate_config(config).errors)
    assert parse_score(" success+0.1 * reward").weights == {"success": 1.0, "reward": 0.1}


def test_a_run_without_an_environment_keeps_the_lowest_held_out_loss(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = state_config(
        tmp_path,
        offline_steps=40,
        eval_frequency=2,
        save_frequency=40,
        log_frequency=40,
        early_stopping_patience=3,
        data__validation_share=0.25,
        actor_lr_schedule__peak_lr=3.0,  # the loss rises soon
        actor_lr_schedule__warmup_steps=8,
    )
    with caplog.at_level(logging.INFO, "acrlpd"):
        train_here(config)
    directory = run_directory(config)
    losses = {m["step"]: m["validation/flow_loss"] for m in metrics_of(directory) if "validation/flow_loss" in m}
    best = min(losses, key=losses.__getitem__)
    summary = read_summary(directory)
    assert summary["best_evaluation"] == {"step": best, "score": losses[best], "by": "validation_loss"}
    assert summary["status"] == "finished early: no improvement" and summary["final_step"] == best + 6
    assert saved_steps(directory) == [best, best + 6]
    words = f"step {best} by held-out loss ({losses[best]:.4g})"
    assert f"best {words}" in caplog.text and words in generate_training_report([directory]).read_text()
    assert find_best(RunReader(directory).read().series, "success") == summary["best_evaluation"]
    assert describe_best({"step": 4_000, "score": 0.5}) == "step 4,000 by success (50 %)"
