"""What the report says about the training, on runs whose curves are made by hand."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from acrlpd.config import apply_config_overrides, get_config, save_config
from acrlpd.monitoring.lr_advice import suggest_learning_rates
from acrlpd.monitoring.report import generate_training_report
from acrlpd.monitoring.report_training import Sections, analyze_training, loss_shares
from acrlpd.runs.record import RunRecord, read_run

STEPS = np.arange(10, 2001, 10)
HEALTHY = {
    "total_loss": 0.5, "critic_loss": 0.2, "bc_loss": 0.3, "q_std": 0.4, "q_ensemble_std": 0.1, "target_q_mean": -20.0,
    "td_error_mean": 0.2, "bootstrap_ratio": 0.9, "candidate_diversity": 0.3, "best_of_n_gain": 0.2,
    "policy_grad_norm": 0.5, "critic_grad_norm": 0.5, "policy_lr": 1e-3, "critic_lr": 3e-4, "bc_weight": 1.0,
}  # fmt: skip
EVEN = np.ones(len(STEPS))


def make_record(directory: Path, curves: Mapping[str, np.ndarray | float], **changes: float) -> RunRecord:
    """A run of the quick start whose healthy metrics have 1 % of noise."""
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True, exist_ok=True)
    save_config(apply_config_overrides(get_config("quickstart"), changes), directory / "config.yaml")
    noisy = {n: v * (1 + 0.01 * rng.normal(size=len(STEPS)) * (not n.endswith("_lr"))) for n, v in HEALTHY.items()}
    columns = noisy | {name: EVEN * values for name, values in curves.items()}
    with (directory / "metrics.jsonl").open("w") as file:
        for i, step in enumerate(STEPS):
            line = {name: float(values[i]) for name, values in columns.items()}
            file.write(json.dumps({"step": int(step), "phase": "offline"} | line) + "\n")
    return read_run(directory)


def analyze(directory: Path, curves: Mapping[str, np.ndarray | float], **changes: float) -> Sections:
    return analyze_training(make_record(directory, curves, **changes))


def test_a_healthy_run_gets_facts_and_no_advice(tmp_path: Path) -> None:
    found = analyze(tmp_path, {})
    assert list(found) == ["Losses", "Values", "Policy"]
    assert found["Losses"]["Trend"].startswith("The total loss shows no trend: about 0.5 over")
    assert found["Losses"]["Balance"] == "Of the total are cloning 60 %, critics 40 %."
    assert found["Losses"]["Convergence"].count("is flat since about step") == 2
    assert "differ by 25 % of the spread of Q over the data: they agree" in found["Values"]["Agreement"]
    assert found["Values"]["Targets"].startswith("Stable")
    assert "90 % of the targets bootstrap" in found["Values"]["Bootstrap"]
    assert "0.5 times the spread" in found["Policy"]["Best-of-N"]


def test_trends_and_moving_targets_are_named(tmp_path: Path) -> None:
    falling = np.linspace(1.0, 0.5, len(STEPS))
    found = analyze(tmp_path, {"total_loss": falling, "critic_loss": falling, "target_q_mean": -20 * falling})
    assert "total loss falls: from 0.749 to 0.5 over the last 990 updates" in found["Losses"]["Trend"]
    assert "critic_loss still falls" in found["Losses"]["Convergence"]
    assert found["Values"]["Targets"].startswith("Still moving: by 12 times the spread of Q")


def test_the_weights_of_the_losses_count(tmp_path: Path) -> None:
    record = make_record(tmp_path, {"bc_weight": 0.1, "actor_loss": 0.27, "actor_weight": 1.0})
    shares = loss_shares(record)
    assert shares is not None and list(shares) == ["improvement", "critics", "cloning"]
    assert shares["improvement"] == pytest.approx(0.54, abs=0.01) and sum(shares.values()) == pytest.approx(1)


def test_networks_of_a_backup_and_of_an_improvement_have_shares(tmp_path: Path) -> None:
    """`implicit_value` and `decoupled` have a loss of V, and `recap` one of its judge; both are parts of the total."""
    found = analyze(tmp_path, {"backup_loss": 0.4, "judge_loss": 0.05, "actor_weight": 2.0})
    assert found["Losses"]["Balance"] == "Of the total are backup 40 %, cloning 30 %, critics 20 %, judge 10 %."
    assert "backup_loss is flat" in found["Losses"]["Convergence"]


@pytest.mark.parametrize(
    ("curves", "learner", "advice"),
    [
        (
            {"critic_loss": np.where(np.arange(len(STEPS)) % 25 == 0, 3.0, 0.2)},
            "critic",
            r"half the learning rate \(--critic_lr 0.00015\): critic_loss was 4 times above 5 times its usual size",
        ),
        (
            {"td_error_mean": np.linspace(0.2, 0.8, len(STEPS))},
            "critic",
            r"\(--critic_lr 0.00015\): td_error_mean / q_std rose from 1.2",
        ),
        (
            {"bc_loss": np.linspace(0.2, 0.4, len(STEPS))},
            "policy",
            r"half the learning rate \(--pi0_lr \S+\): bc_loss rose from 0.301 to 0.4 over the last 990",
        ),
        (
            {"td_error_mean": np.linspace(0.2, 0.8, len(STEPS)), "critic_grad_norm": 250.0},
            "critic",
            r"; its gradient norm 250 is clipped to \d+, so harder clipping would not help\.",
        ),
        (
            {"bc_loss": np.linspace(1.0, 0.4, len(STEPS)), "policy_grad_norm": 0.2},
            "policy",
            r"Twice the learning rate \(--pi0_lr \S+\) may do: bc_loss still fell from 0.698 to 0.4",
        ),
    ],
)
def test_advice_names_the_rate_and_the_reason(
    tmp_path: Path, curves: Mapping[str, np.ndarray | float], learner: str, advice: str
) -> None:
    found = suggest_learning_rates(make_record(tmp_path, curves, critic_lr=3e-4))
    assert list(found) == [learner]
    assert re.search(advice, found[learner]), found


def test_what_is_no_reason_gives_no_advice(tmp_path: Path) -> None:
    falling = np.linspace(1.0, 0.4, len(STEPS))
    silent: list[Mapping[str, np.ndarray | float]] = [
        {"critic_grad_norm": 250.0},  # clipped in every update, as most critics are
        {"critic_loss": np.linspace(0.2, 2.0, len(STEPS)), "td_error_mean": 0.2 * EVEN, "q_std": 0.4 * EVEN},
        {"bc_loss": falling, "policy_grad_norm": 5.0},  # clipped
        {"bc_loss": falling, "policy_lr": np.linspace(1e-3, 1e-4, len(STEPS))},  # the rate is on its way down
        {"bc_loss": falling, "policy_grad_norm": 0.2, "critic_grad_norm": 0.2, "policy_lr": np.linspace(0, 1, 200)},
    ]
    for i, curves in enumerate(silent):
        assert suggest_learning_rates(make_record(tmp_path / str(i), curves)) == {}, curves.keys()
    improved = make_record(
        tmp_path / "improved", {"bc_loss": np.linspace(0.2, 0.4, len(STEPS))}, **{"loss_weights.actor_weight": 1.0}
    )
    assert suggest_learning_rates(improved) == {}  # the improvement may move the policy off the data


def test_noise_that_remembers_is_no_reason(tmp_path: Path) -> None:
    """Losses of successive lines are alike, so they wander without a trend."""
    for seed in range(8):
        rng, wander = np.random.default_rng(seed), np.zeros(len(STEPS))
        for i in range(1, len(STEPS)):
            wander[i] = 0.9 * wander[i - 1] + 0.04 * rng.normal()
        curves = {name: HEALTHY[name] * (1 + wander) for name in ("critic_loss", "bc_loss", "td_error_mean")}
        assert suggest_learning_rates(make_record(tmp_path / str(seed), curves)) == {}


def test_both_forms_of_the_report_have_the_section(tmp_path: Path) -> None:
    make_record(tmp_path, {"td_error_mean": np.linspace(0.2, 0.8, len(STEPS))})
    page = generate_training_report([tmp_path])
    for text in (page.read_text(), page.with_suffix(".md").read_text()):
        assert "How the training went" in text and "they agree" in text and "Try half the learning rate" in text
