"""`acrlpd tune` as a user meets it: a real study, kills in the middle, and messages."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from fake_trial import WAITS
from study_helpers import is_alive, run

from acrlpd.cli.main import main
from acrlpd.config import load_config
from acrlpd.runs.directory import is_finished

HERE = pathlib.Path(__file__).parent
# How long a process may take on a busy machine.
WAIT_S = 300.0
BASE = """
base_config: debug
model: {type: state_flow, state_dim: 7, action_dim: 7, action_horizon: 10, hidden_dims: [32]}
training: {offline_steps: 8, log_frequency: 2}
data: {validation_share: 0.25}
"""


def wait_for(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the event did not come"
        time.sleep(0.05)


def test_trials_are_runs_of_acrlpd_train_and_the_result_is_a_config(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "space.yaml").write_text("pi0_lr: {low: 1.0e-5, high: 1.0e-2, log: true}\n")
    arguments = ["--config", "base.yaml", "--space", "space.yaml", "--trials", "2", "--trial_steps", "4"]
    assert main(["tune", *arguments, "--seeds", "0", "--final_seeds", "0"]) == 0
    shown = capfd.readouterr()
    assert "trials 2/2" in shown.err and "all 0: the config itself" in shown.err  # progress, also when piped
    assert "acrlpd train --config" in shown.out
    study = tmp_path / "checkpoints/debug/default-tune"
    for number in (0, 1):
        run_directory = study / f"trials/all-{number}/debug/trial-seed0"
        assert is_finished(run_directory)
        assert load_config(run_directory / "config.yaml").training.offline_steps == 4
    assert load_config(study / "best.yaml").training.offline_steps == 8
    assert "validation/relative_best_of_n_error" in (study / "report.md").read_text()


def test_a_study_has_one_tuner_and_survives_its_kill(tmp_path):
    """The fake trial does not watch its tuner, as the process of a real trial does, so the test ends it."""
    command = [sys.executable, str(HERE / "tuner_process.py"), str(tmp_path), str(WAITS), "4"]
    tuner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    study = tmp_path / "debug/default-tune"
    try:
        wait_for(lambda: (study / "waits").exists() and (study / "waits").read_text())
        with pytest.raises(ValueError, match="another process is working on this study"):
            run(tmp_path, batch_size=WAITS, trials=4)
    finally:
        tuner.kill()
        tuner.wait()
    os.kill(int((study / "waits").read_text()), signal.SIGKILL)
    with (study / "journal.log").open("ab") as journal:
        journal.write(b'{"op_code": 4, "worker')  # a line that the kill cut off
    (study / "journal.log.lock").touch()
    (study / "go").touch()
    result = run(tmp_path, batch_size=WAITS, trials=4)
    lost, control = result.stages[0].records[:2]
    assert (lost.outcome, control.outcome) == ("repeated", "finished")
    assert lost.is_control and control.is_control and lost.values == control.values
    assert [record.outcome for record in result.records[1:]] == ["finished"] * 4
    assert not (study / "trials" / "critics-0").exists()


def test_the_process_of_a_trial_ends_with_its_tuner(tmp_path):
    """The trial waits for a config from a named pipe, which never comes."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    script = (
        "import os, subprocess, sys, time\n"
        f"trial = [sys.executable, '-m', 'acrlpd.tuning.trial_process', str(os.getpid())]\n"
        f"process = subprocess.Popen([*trial, 'configs', 'show', {str(pipe)!r}], start_new_session=True)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    tuner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        trial = int(tuner.stdout.readline())
        writer = os.open(pipe, os.O_WRONLY)  # returns when the trial has opened the pipe
        assert is_alive(trial)
    finally:
        tuner.kill()
        tuner.wait()
    wait_for(lambda: not is_alive(trial))
    os.close(writer)


def test_the_default_space_is_written_out_and_accepted(tmp_path, capsys):
    file = tmp_path / "space.yaml"
    assert main(["tune", "--config", "quickstart", "--write_space", str(file)]) == 0
    assert "learning_rates:" in file.read_text() and str(file) in capsys.readouterr().out
    assert main(["tune", "--config", "quickstart", "--write_space", str(file)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "3"], "--trials 3 are too few for 3 stages"),
        (["--trials", "0"], "--trials must be at least 1; found 0"),
        (["--seeds", "1", "1"], "a seed is given twice"),
        (["--space", "missing.yaml"], "the space missing.yaml cannot be read"),
        (["--env.id", "None"], "a trial cannot be judged"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    changes = ["--training.online-steps", "0", "--evaluation.baselines"] if "--env.id" in arguments else []
    assert main(["tune", "--config", "quickstart", *changes, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_optuna_the_command_says_how_to_get_it(monkeypatch, capsys):
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest))
    assert main(["tune", "--config", "quickstart"]) == 2
    assert "needs the package optuna: pip install" in capsys.readouterr().err
