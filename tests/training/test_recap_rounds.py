"""RECAP as whole runs: resumed, exported with its label, and in rounds that are interrupted."""

import pathlib
from typing import Any

import numpy as np
import pytest
from training_helpers import arrays_of, assert_equal_arrays, metrics_of, state_config, train_here

from acrlpd.cli.main import main
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, get_config, save_config
from acrlpd.data.pipeline.config_episodes import open_config_source
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.sources.source import DatasetError, Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.policies.checkpoint import CheckpointError, load_policy, open_checkpoint
from acrlpd.runs.directory import read_summary, run_directory
from acrlpd.serving.export import export_policy
from acrlpd.training import recap_rounds

EPISODES = 3
CAMERA = "observation.images.side"  # of the toy, which renders 16 x 24


def recap_config(directory: pathlib.Path, **changes: Any) -> RLTrainConfig:
    """A tiny pi0 without cameras in the toy environment."""
    overrides = {
        "batch_size": 8,
        "model.action_dim": 4,
        "model.action_horizon": 4,
        "qchunking.horizon_length": 3,
        "qchunking.action_dim": 2,
        "improvement.hidden_dims": [16],
        "acrlpd.critic_warmup_steps": 0,
        "acrlpd.sampling_steps": 1,
        "offline_steps": 4,
        "training.log_frequency": 1,
        "checkpoints.directory": str(directory),
        "data.num_workers": 0,
        "data.prompt_from_task": True,
        "env.id": None,
        "env.num_envs": 2,
        "env.max_episode_steps": None,
        "evaluation.num_episodes": 2,
        "training.eval_frequency": 0,
        "training.save_frequency": 4,
    }
    return apply_config_overrides(get_config("quickstart_recap"), overrides | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The checkpoint of a run on random numbers."""
    config = recap_config(tmp_path_factory.mktemp("runs"), **{"data.repo_id": "fake", "exp_name": "straight"})
    train_here(config)
    return run_directory(config) / "4"


def test_a_resumed_run_is_the_uninterrupted_run(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = recap_config(tmp_path, **{"data.repo_id": "fake"})
    train_here(apply_config_overrides(config, offline_steps=2))
    train_here(config, resume=True, allow_changed=["training.offline_steps"])
    assert_equal_arrays(arrays_of(run_directory(config) / "4"), arrays_of(trained))
    [*_, last] = [line for line in metrics_of(trained.parent) if "judge_loss" in line]
    assert last["improvement_grad_norm"] > 0 and last["policy_grad_norm"] > 0 and last["skipped_updates"] == 0


def test_an_export_says_which_prompt_openpi_must_be_sent(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert export_policy(trained, tmp_path / "export", guidance=2.0)
    readme = (tmp_path / "export" / "README.md").read_text()
    assert "This server adds the label: clients send the task alone." in readme
    assert "--default_prompt=cube Advantage: positive" in readme
    assert "must be the task, one space and `Advantage: positive`" in readme and "exported with 2" in readme
    exported = open_checkpoint(tmp_path / "export")
    assert exported.rl_config.improvement.guidance == 2.0  # type: ignore[attr-defined]
    seen = load_policy(exported).observe({"state": np.zeros(2), "prompt": "cube"})
    text = bytes(int(token) - 3 for token in np.asarray(seen.labelled_prompt)[1] if token > 2).decode()
    assert text == "cube Advantage: positive\n"


def test_guidance_is_refused_for_a_policy_without_labels(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, offline_steps=1)
    train_here(config)
    with pytest.raises(CheckpointError, match="--guidance needs a policy that was trained with labels"):
        open_checkpoint(run_directory(config)).with_guidance(2.0)


def write_demonstrations(root: pathlib.Path, image_size: tuple[int, int] | None = None) -> None:
    """Episodes of the toy, of which every other one succeeds, and one was steered by a human."""
    cameras = {} if image_size is None else {CAMERA: Feature("video", (*image_size, 3))}
    features = {
        "observation.state": Feature("float32", (3,)),
        "action": Feature("float32", (2,)),
        "next.success": Feature("bool", ()),
        "intervention": Feature("bool", (1,)),
    }
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=10, features=features | cameras) as writer:
        for episode in range(5):  # the config leaves the last one out
            length = 8 + episode
            columns = {
                "observation.state": rng.normal(5.0, 10.0, (length, 3)),
                "action": rng.uniform(-1, 1, (length, 2)),
                "next.success": (np.arange(length) == length - 1) & (episode % 2 == 0),
                "intervention": np.full((length, 1), episode == 2),
            }
            frames = {name: np.zeros((length, *camera.shape), np.uint8) for name, camera in cameras.items()}
            writer.add_steps(columns, frames)
            writer.end_episode("go right")


def rounds_config(directory: pathlib.Path, image_size: tuple[int, int] | None = None, **changes: Any) -> RLTrainConfig:
    """Rounds in the toy environment on demonstrations of the toy."""
    write_demonstrations(directory / "demos", image_size)
    overrides = {
        "data.data_dir": str(directory / "demos"),
        "data.assets_dir": str(directory / "assets"),
        "data.asset_id": "toy",
        "data.demonstrations.num_episodes": 0,
        "env.id": "toy_env:toy",
        "online.episodes_per_round": EPISODES,
        "data.max_episodes": 4,
        "exp_name": "r",
    }
    config = recap_config(directory / "runs", **overrides | changes)
    write_norm_stats(config)
    return config


def test_the_flags_that_a_refusal_names_exist(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds of another config end the command after the plan, before anything is trained."""
    config = rounds_config(tmp_path, **{"improvement.hidden_dims": [10**6, 10**6]})  # of many terabytes
    save_config(config, tmp_path / "mine.yaml")
    shared = run_directory(apply_config_overrides(config, exp_name="r-rounds"))
    shared.mkdir(parents=True)
    save_config(apply_config_overrides(config, batch_size=4), shared / "config.yaml")
    command = ["recap", "--config", str(tmp_path / "mine.yaml")]
    assert main(command) == 2
    assert "--ignore_plan trains all the same" in capsys.readouterr().err
    assert main([*command, "--ignore_plan", "--allow_long"]) == 2
    assert "holds rounds of another config" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_rounds_continue(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Play data, whose last step may be a success that does not end the task.
    config = rounds_config(tmp_path, **{"data.rewards.success_ends_episode": False})
    recap_rounds.check_rounds(config)

    with monkeypatch.context() as patch:  # the process ends after the first round was played
        patch.setattr(recap_rounds, "join_datasets", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recap_rounds.run_rounds(config, num_rounds=2)
    first, shared = (run_directory(apply_config_overrides(config, exp_name=name)) for name in ("r-round0", "r-rounds"))
    finished = {path: path.stat().st_mtime_ns for path in [*(first / "4").rglob("*"), *(shared / "replay").iterdir()]}
    assert len(list((shared / "replay").glob("*.npz"))) == EPISODES

    assert recap_rounds.run_rounds(config, num_rounds=2) == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # neither trained nor played again
    second = run_directory(apply_config_overrides(config, exp_name="r-round1"))
    assert read_summary(first)["final_step"] == read_summary(second)["final_step"] == 4  # both from the beginning
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip("│ ")[:1] in ("0", "1")]
    assert len(rows) == 2 and all(f"of {EPISODES}" in " ".join(row) for row in rows)

    data = open_config_source(recap_rounds.round_config(config, 1, shared))
    assert len(data) == 4 + EPISODES
    assert data.episode(2).columns["intervention"].all() and not data.episode(5).columns["intervention"].any()
    assert [bool(data.episode(i).columns["next.success"].any()) for i in range(4)] == [True, False, True, False]
    demos = open_config_source(config)
    np.testing.assert_array_equal(data.episode(3).columns["action"], demos.episode(3).columns["action"])

    with pytest.raises(ConfigError, match=r"holds rounds of another config:\n  batch_size: \d+ -> 4\n"):
        recap_rounds.run_rounds(apply_config_overrides(config, batch_size=4), num_rounds=2)


def test_episodes_that_do_not_fit_the_demonstrations_are_refused_before_the_first_round(tmp_path: pathlib.Path) -> None:
    camera = {"model.image_keys": ["base_0_rgb"], "data.repack.base_0_rgb": CAMERA}
    config = rounds_config(tmp_path, (32, 48), **camera)
    expected = r"\(32, 48, 3\) in .*demos and \(16, 24, 3\) in environment 'toy_env:toy'.* env.image_size to 32 48"
    with pytest.raises(DatasetError, match=expected):
        recap_rounds.run_rounds(config, num_rounds=2)
    assert not (tmp_path / "runs").exists()  # so that the command may be given again with another config


def test_rounds_need_labels_and_an_environment(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"set env\.id"):
        recap_rounds.check_rounds(recap_config(tmp_path))
    with pytest.raises(ConfigError, match=r"needs an improvement that labels prompts.* found improvement awr"):
        recap_rounds.check_rounds(get_config("quickstart"))
