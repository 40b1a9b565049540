"""Evaluations during training are logged, keep the best checkpoint, and end a run that does not improve."""

import json
import pathlib

from training_helpers import Processes, metrics_of, scored, state_config, train_here

from acrlpd.checksums import write_checksums
from acrlpd.runs.directory import run_directory, saved_steps

SCORES = {"5": 0.1, "10": 0.2, "15": 0.9, "20": 0.3, "25": 0.5, "30": 0.8}


def test_evaluation_decides_what_is_kept_and_when_it_is_over(processes: Processes, tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=100, eval_frequency=5, save_frequency=4, early_stopping_patience=3)
    directory = run_directory(config)
    # The save of step 24 has begun, so the save of step 20 is complete, with one evaluation without improvement.
    killed = processes.run(config, order={"scores": SCORES, "kill_before_step": 25})
    assert killed.returncode == -9, killed.output
    assert saved_steps(directory)[-1] in (20, 24)
    record = directory / str(saved_steps(directory)[-1]) / "run" / "run.json"
    # As if the first process had run for days.
    record.write_text(json.dumps(json.loads(record.read_text()) | {"wall_time_s": 1e6}))
    write_checksums(record.parent)
    train_here(config, scored(SCORES), resume=True)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["final_step"]) == ("finished early: no improvement", 30)
    assert summary["best_evaluation"] == {"step": 15, "score": 0.9, "by": "success"}
    assert summary["wall_time_s"] > 1e6
    # Step 15 is not a multiple of save_frequency: the run saved it because it was the best.
    assert saved_steps(directory) == [15, 30]
    scores = [(str(m["step"]), m["eval/success_rate"]) for m in metrics_of(directory) if "eval/success_rate" in m]
    assert scores == list(SCORES.items())  # Every evaluation is logged once.


def test_of_equal_scores_the_first_is_the_best_and_is_kept(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=30, eval_frequency=5, save_frequency=10, checkpoints__max_to_keep=1)
    scores = {"5": 0.8, "10": 0.8, "15": 0.1, "20": 0.8, "25": 0.0, "30": 0.8}
    train_here(config, scored(scores))
    directory = run_directory(config)
    assert json.loads((directory / "summary.json").read_text())["best_evaluation"]["step"] == 5
    assert saved_steps(directory) == [5, 30]
