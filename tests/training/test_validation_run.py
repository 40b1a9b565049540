"""Runs that hold episodes out: what they log, record and say, and that a resumed run goes on as if nothing happened."""

import json
import logging
import pathlib

import pytest
from training_helpers import arrays_of, assert_equal_arrays, metrics_of, state_config, train_here

from acrlpd.monitoring.report import generate_training_report
from acrlpd.runs.directory import run_directory


def test_validation_is_logged_and_said_and_survives_a_resume(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"data__validation_share": 0.25, "eval_frequency": 5, "save_frequency": 5, "log_frequency": 5}
    whole = state_config(tmp_path, offline_steps=10, exp_name="whole", **settings)
    with caplog.at_level(logging.INFO, "acrlpd"):
        train_here(whole)
    lines = [line for line in metrics_of(run_directory(whole)) if "validation/flow_loss" in line]
    assert [line["step"] for line in lines] == [5, 10]
    assert {"validation/relative_action_error", "validation/action_error/6", "validation/q_rmse"} <= lines[0].keys()
    assert lines[0]["validation/flow_loss"] != lines[1]["validation/flow_loss"]
    said = "\n".join(caplog.messages)
    assert "of 2 held-out episodes" in said and "; 6 episodes to train on" in said
    assert f"validation at step 5: flow loss {lines[0]['validation/flow_loss']:.4g}, action error" in said
    assert "finished at step 10; held-out action error" in said and "compiling the train step" in said
    page = generate_training_report([run_directory(whole)]).read_text()
    assert 'id="validation"' in page and "acrlpd eval" not in page

    half = state_config(tmp_path, offline_steps=5, exp_name="resumed", **settings)
    train_here(half)
    again = state_config(tmp_path, offline_steps=10, exp_name="resumed", **settings)
    train_here(again, resume=True, allow_changed=("training.offline_steps",))
    assert metrics_of(run_directory(again)) == metrics_of(run_directory(whole))
    train_here(again, resume=True)  # nothing is left to do, and nothing is written twice
    assert metrics_of(run_directory(again)) == metrics_of(run_directory(whole))
    record = "evaluations/10/validation.json"
    assert (run_directory(again) / record).read_text() == (run_directory(whole) / record).read_text()
    summary = json.loads((run_directory(again) / "summary.json").read_text())
    assert summary["evaluation"]["offline"]["validation/flow_loss"] == lines[1]["validation/flow_loss"]


def test_looking_at_held_out_episodes_changes_nothing_that_is_learned(tmp_path: pathlib.Path) -> None:
    often = state_config(tmp_path, offline_steps=6, exp_name="often", data__validation_share=0.25, eval_frequency=2)
    once = state_config(tmp_path, offline_steps=6, exp_name="once", data__validation_share=0.25, eval_frequency=0)
    for config in (often, once):
        train_here(config)
    assert_equal_arrays(*(arrays_of(run_directory(config) / "6") for config in (often, once)))
