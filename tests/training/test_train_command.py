"""`acrlpd train` from the command line, on real datasets of both kinds, to the files of a run."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest
from training_helpers import Processes, arrays_of, metrics_of, state_config

from acrlpd.cli.main import main
from acrlpd.config import load_config, save_config
from acrlpd.runs.checkpoint_layout import load_checkpoint_metadata
from acrlpd.runs.directory import run_directory, saved_steps

DATASETS = pathlib.Path(__file__).parents[1] / "datasets"


def acrlpd(processes: Processes, cwd: pathlib.Path, *args: str) -> "subprocess.CompletedProcess[str]":
    environment = processes.environment(devices=1)
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # the command itself keeps XLA quiet
    return subprocess.run(
        [sys.executable, "-m", "acrlpd.cli.main", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("dataset", ["aloha_v30", "aloha_hdf5_sim_raw"])
def test_a_run_on_a_dataset(
    dataset: str,
    processes: Processes,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Statistics, a dry run, the run, and every file that it leaves."""
    with tarfile.open(DATASETS / f"{dataset}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = state_config(
        tmp_path / "checkpoints",
        exp_name="first",
        model__state_dim=14,
        model__action_dim=14,
        qchunking__action_dim=14,
        data__repo_id=None,
        data__data_dir=str(tmp_path / dataset),
        data__assets_dir=str(tmp_path / "assets"),
        data__asset_id="lab/robot",
        offline_steps=6,
        save_frequency=3,
        log_frequency=2,
    )
    save_config(config, tmp_path / "experiment.yaml")
    run = ("train", "--config", "experiment.yaml")
    directory = run_directory(config)
    monkeypatch.chdir(tmp_path)
    if dataset == "aloha_hdf5_sim_raw":  # HDF5 does not say what succeeded
        assert main(["data", "label", dataset, "--success", "0-1"]) == 0
    assert main(["data", "stats", "--config", "experiment.yaml"]) == 0
    if dataset == "aloha_v30":
        capsys.readouterr()
        assert main([*run, "--dry_run", "--show_plan"]) == 0
        said = capsys.readouterr()
        assert "no step was made" in said.err and "activations" in said.out
        assert not directory.exists()

    trained = acrlpd(processes, tmp_path, *run)
    assert trained.returncode == 0, trained.stderr
    [plan] = re.findall(r"^plan: (.*)", trained.stdout, re.MULTILINE)  # one line, where nobody asks for the table
    assert re.fullmatch(rf"{config.name} on 1 x CPU: \S+ \w+ of \S+ \w+ per device, \S+ \w+ of disk", plan)
    assert "activations" not in trained.stdout
    assert load_config(directory / "config.yaml") == config
    lines = metrics_of(directory)
    assert [line["step"] for line in lines if "phase" in line] == [2, 4, 6]
    # The HDF5 dataset has too few episodes to hold one out.
    validated = [line["step"] for line in lines if "validation/flow_loss" in line]
    assert validated == ([6] if dataset == "aloha_v30" else [])
    assert saved_steps(directory) == [6]
    stats = (tmp_path / "assets/lab/robot/norm_stats.json").read_bytes()
    assert (directory / "6/assets/lab/robot/norm_stats.json").read_bytes() == stats
    assert arrays_of(directory / "6")[".step"] == 6
    origin = {"aloha_v30": "REWARD_COLUMN", "aloha_hdf5_sim_raw": "LABELS"}[dataset]
    assert load_checkpoint_metadata(directory / "6")["reward_origin"] == origin
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["final_step"]) == ("finished", 6)
    assert summary["last_metrics"]["step"] == 6
    assert summary["wall_time_s"] > 0
    assert set(summary["time_s"]) == {"data_wait", "step", "checkpoint", "evaluation", "rollouts"}

    if dataset == "aloha_v30":
        assert main([*run]) == 2
        refused = capsys.readouterr().err
        assert "--resume" in refused and "--overwrite" in refused


def test_quickstart(
    processes: Processes,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is there: demonstrations are collected, statistics made, the policy trained on them, then online."""
    pytest.importorskip("ogbench")
    small = (
        "--offline_steps 2 --online_steps 2 --batch_size 8 --training.log-frequency 1 --online.start-steps 20 "
        "--data.demonstrations.num-episodes 2 --data.demonstrations.max-episode-steps 20 "
        "--acrlpd.sampling-steps 1 --acrlpd.num-action-samples 2 --env.num-envs 2 --env.max-episode-steps 10 "
        "--acrlpd.policy-data all --qchunking.success-ratio None "  # no expert succeeds within 20 steps
        "--evaluation.num-episodes 2 --evaluation.baselines"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "quickstart", "--dry_run"]) == 2
    assert "would begin with 160 demonstrations" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    trained = acrlpd(processes, tmp_path, "train", "--config", "quickstart", *small.split())
    assert trained.returncode == 0, trained.stderr
    directory = tmp_path / "checkpoints/quickstart/default"
    lines = metrics_of(directory)
    assert [line["step"] for line in lines if "total_loss" in line] == [1, 2, 3, 4]
    assert (directory / "4/assets/quickstart/norm_stats.json").exists()
    summary = json.loads((directory / "summary.json").read_text())
    assert {phase: found["episodes"] for phase, found in summary["evaluation"].items()} == {"offline": 2, "online": 2}
    assert summary["online"]["env_steps"] >= 20
    said = trained.stderr
    assert re.search(r"^evaluation at step 2: success 0 % \(0 to \d+ %\), 2 episodes$", said, re.MULTILINE)
    assert re.search(r"^episodes before step \d: success .*, \d+ environment steps in \d+ episodes", said, re.MULTILINE)
    assert re.search(r"^finished at step 4; success 0 % \(0 to \d+ %\); .*checkpoint ", said, re.MULTILINE)
    assert not re.search(r"^[IWEF]\d{4} |^(INFO|WARNING|ERROR):", said, re.MULTILINE)  # as XLA and absl speak


CACHE = """
from acrlpd.process import enable_compilation_cache
import jax
enable_compilation_cache()
print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
"""


@pytest.mark.parametrize("chosen", [None, "/somewhere/else"])
def test_compiled_programs_are_kept_by_default(chosen: str | None, tmp_path: pathlib.Path) -> None:
    settings = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {key: value for key, value in os.environ.items() if key not in settings}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    if chosen:
        environment |= dict(zip(settings, (chosen, "0.1"), strict=True))
    directory, least_time = subprocess.run(
        [sys.executable, "-c", CACHE], capture_output=True, text=True, env=environment, check=True
    ).stdout.split()
    assert directory == chosen if chosen else directory.startswith(str(tmp_path / "acrlpd" / "xla"))
    assert float(least_time) == (0.1 if chosen else 0.5)  # seconds
