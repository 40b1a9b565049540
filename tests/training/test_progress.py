"""What is shown and measured: progress, rates, utilisation."""

import logging
import time

import pytest

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.plan.flops import step_flops
from acrlpd.runs.metrics_log import EVALUATION, ONLINE, VALIDATION
from acrlpd.training.progress import (
    Clock,
    Progress,
    ProgressBars,
    describe_metrics,
    describe_outcome,
    model_flops_utilization,
    update_flops,
)

LINE = {
    "step": 100,
    "total_loss": 1.23456,
    "q_mean": -4.5,
    "timing/samples_per_s": 640.0,
    "timing/steps_per_s": 10.0,
    "timing/mfu": 0.314,
}


def test_without_a_terminal_there_is_a_line_per_logged_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "acrlpd"), Progress(ProgressBars(enabled=True), "offline", 0, 1_000) as progress:
        progress.advance_to(99)
        progress.show(LINE)
    assert caplog.messages == ["offline 100/1000  loss 1.235  Q -4.5  samples/s 640.0  MFU 31.4%  eta 0:01:30"]


def test_what_is_not_known_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "acrlpd"), Progress(ProgressBars(enabled=True), "offline", 0, 1_000) as progress:
        progress.show({"step": 1, "total_loss": None, "q_mean": 2.0})
    assert caplog.messages == ["offline 1/1000  Q 2"]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with Progress(ProgressBars(enabled=True), "offline", 0, 1_000) as progress:
        progress.show(LINE)
    output = capsys.readouterr().err
    assert "100/1000" in output
    assert "eta 0:01:30" in output


def test_other_processes_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "acrlpd"),
        Progress(ProgressBars(enabled=False), "offline", 0, 1_000) as progress,
    ):
        progress.show(LINE)
    assert not caplog.messages


def test_evaluations_and_rounds_have_a_line() -> None:
    rate = {"success_rate": 0.5, "episodes": 16.0, "lost_episodes": 2.0}
    interval = {"success_rate_low": 0.28, "success_rate_high": 0.72}
    found = describe_metrics(1_200, EVALUATION, rate | interval)
    assert found == "evaluation at step 1,200: success 50 % (28 to 72 %), 16 episodes, 2 lost"
    totals = {"env_steps": 4_321.0, "total_episodes": 40.0}
    found = describe_metrics(1_301, ONLINE, rate | totals | {"lost_episodes": 0.0})
    so_far = "4,321 environment steps in 40 episodes so far"
    assert found == f"episodes before step 1,301: success 50 % (28 to 72 %), 16 episodes, {so_far}"
    found = describe_metrics(10, VALIDATION, {"flow_loss": 0.12345, "relative_action_error": 0.421, "q_rmse": 3.0})
    assert found == "validation at step 10: flow loss 0.1235, action error 42 % of the mean action's"


def test_the_last_line_of_a_run_has_its_outcome() -> None:
    assert describe_outcome({"success_rate": 0.76, "interval": [0.62, 0.86]}) == ["success 76 % (62 to 86 %)"]
    assert describe_outcome({"success_rate": 0.76}) == ["success 76 %"]
    assert describe_outcome({"validation/relative_action_error": 0.4}) == [
        "held-out action error 40 % of the mean action's"
    ]
    assert describe_outcome(None) == []


class FakeTime:
    """A clock that is moved by hand."""

    now = 100.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def test_time_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime()
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    clock = Clock()
    for _ in range(4):
        with clock.measure("data_wait"):
            fake.pass_(0.5)
        fake.pass_(1.5)
        clock.count_steps(1)
    with clock.measure("checkpoint"):
        fake.pass_(2.0)
    assert clock.read() == {
        "steps_per_s": 4 / 10,
        "step_s": 1.5,
        "data_wait_s": 0.5,
        "checkpoint_s": 2.0,
        "evaluation_s": 0.0,
        "rollouts_s": 0.0,
    }
    assert clock.read() == {}  # nothing since
    with clock.measure("evaluation"):
        fake.pass_(3.0)
    with clock.measure("rollouts"):
        fake.pass_(1.0)
    expected = {"data_wait": 2.0, "checkpoint": 2.0, "evaluation": 3.0, "rollouts": 1.0, "step": 6.0}
    assert clock.totals() == expected


def test_utilisation_counts_useful_arithmetic() -> None:
    config = get_config("debug")
    recomputing = apply_config_overrides(config, {"model.remat_policy": "full"})
    keeping = apply_config_overrides(config, {"model.remat_policy": "none"})
    assert update_flops(recomputing) == pytest.approx(update_flops(keeping))
    assert update_flops(keeping) == step_flops(keeping).total * config.batch_size
    assert model_flops_utilization(config, 1.0) is None  # nobody knows the peak of a CPU
