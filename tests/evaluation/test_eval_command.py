"""`acrlpd eval` on real checkpoints: of a run, of an export, of openpi."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small_checkpoints import openpi_checkpoint, openpi_config
from toy_agent import NORM_STATS, toy_agent, toy_config

from acrlpd.cli.eval import main
from acrlpd.cli.main import main as command
from acrlpd.config import QChunkingConfig, load_config, save_config
from acrlpd.data.pipeline.norm_stats import save_norm_stats
from acrlpd.data.pipeline.rewards import RewardOrigin
from acrlpd.envs import Env, register_env
from acrlpd.evaluation import protocol
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.policies.checkpoint import open_checkpoints
from acrlpd.training.checkpoints.writer import CheckpointWriter

# The data of this run had no rewards of its own, so the environment's are not what the critics know.
REWARD_ORIGIN = RewardOrigin.SUCCESS_COLUMN
ARMS = 14  # dims of state and actions in the statistics of openpi's checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "first"
    directory.mkdir()
    config = toy_config()
    save_norm_stats(directory / "stats", NORM_STATS)
    assets = {"toy/norm_stats.json": (directory / "stats" / "norm_stats.json").read_bytes()}
    writer = CheckpointWriter(directory, config, assets)
    state = {"reward_origin": REWARD_ORIGIN.name}
    writer.save(toy_agent(config), 40, rng=jax.random.key(0), state=state)
    writer.close()
    return directory


def evaluate(reward_origin: RewardOrigin | None) -> dict[str, Any]:
    config = toy_config()
    with EvaluationProtocol(config, NORM_STATS, reward_origin=reward_origin, num_workers=0) as evaluator:
        return evaluator.evaluate(evaluator.policy(toy_agent(config))).to_json()


def test_a_checkpoint_is_judged_as_the_agent_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run), "--num-workers", "0", "--videos", "1", "--output", str(tmp_path), "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    own_rewards, expected = (evaluate(origin) for origin in (None, REWARD_ORIGIN))
    found = printed["first 40"]
    assert found["per_episode"] == expected["per_episode"]
    assert found["calibration"] == expected["calibration"] != own_rewards["calibration"]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == printed
    assert len(list(tmp_path.rglob("*.mp4"))) == 1


def test_options_override_the_checkpoints_config(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--episodes", "3", "--seed", "7", "--best-of-n", "1", "--env", "toy", "toy-nan-8"]
    assert main([str(run), "--num-workers", "0", "--json", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [e["seed"] for e in printed["first 40 in toy"]["per_episode"]] == [7, 8, 9]
    assert printed["first 40 in toy"]["best_of_n"]["value_gain"] == pytest.approx(0.0, abs=1e-6)
    assert printed["first 40 in toy-nan-8"]["lost_episodes"] == 1


def test_another_execution_of_chunks(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "execution")
    steps = {}
    for options in ([], ["--replan-steps", "2"], ["--execution", "ensembling:TemporalEnsembling"]):
        assert main([str(run), "--num-workers", "0", "--episodes", "1", "--json", *options]) == 0
        [found] = json.loads(capsys.readouterr().out).values()
        steps[tuple(options[-1:])] = found["traces"][0]["chunk_steps"][:3]
    assert list(steps.values()) == [[0, 3, 6], [0, 2, 4], [0, 1, 2]]
    with pytest.raises(ValueError, match=r"env\.execution must be one of open_loop, or module:Name of your own"):
        main([str(run), "--execution", "closed_loop"])


def test_the_table_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run / "40"), "--num-workers", "0"]) == 0
    assert "first 40" in capsys.readouterr().out


def test_a_pipe_gets_lines_of_progress(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_PROGRESS_PERIOD_S", 0.0)  # a line after each episode
    with caplog.at_level("INFO", "acrlpd"):
        assert main([str(run / "40"), "--num-workers", "0"]) == 0
    first, *lines = caplog.messages
    assert first == "first 40: 6 episodes, after the policy is compiled"
    assert len(lines) == 6 and re.fullmatch(r"toy: 6 of 6 episodes, [0-6] of them successes", lines[-1])


def test_what_is_missing_is_named(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        main([])
    with pytest.raises(ValueError, match="--videos needs --output"):
        main([str(run), "--videos", "1"])
    with pytest.raises(ValueError, match="--best_of_n must be at least 1; found 0"):
        main([str(run), "--best-of-n", "0"])
    with pytest.raises(ValueError, match="neither an exported directory"):
        main([str(tmp_path)])
    with pytest.raises(ValueError, match="--seed must be at least 0; found -1"):
        main([str(run), "--seed", "-1"])
    with pytest.raises(ValueError, match="--videos must be at least 0; found -1"):
        main([str(run), "--videos", "-1", "--output", str(tmp_path)])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output must be a directory; .*file is a file"):
        main([str(run), "--output", str(tmp_path / "file")])


def test_checkpoints_of_equal_name_are_told_apart(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "elsewhere" / run.name
    shutil.copytree(run, other)
    assert main([str(run), str(other), "--episodes", "1", "--num-workers", "0", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {str(run / "40"), str(other / "40")}


def test_what_is_named_twice_is_judged_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = [str(run), str(run / "40"), "--env", "toy", "toy"]
    assert main([*twice, "--episodes", "1", "--num-workers", "0", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["first 40 in toy"]


def test_an_export_is_judged_as_its_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "exported"), "--num-workers", "0", "--json"]) == 0
    of_run, of_export = json.loads(capsys.readouterr().out).values()
    assert of_export == of_run  # calibration included: the export knows where the rewards came from
    assert of_run["calibration"] is not None


def test_an_export_without_critics_is_judged_without_a_choice(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["export", str(run), "--output", str(tmp_path / "plain"), "--critics", "none"]) == 0
    capsys.readouterr()
    options = ["--num-workers", "0", "--json", "--episodes", "2"]
    assert main([str(tmp_path / "plain"), *options, "--robustness"]) == 0
    [found] = json.loads(capsys.readouterr().out).values()
    assert (found["best_of_n"], found["calibration"]) == (None, None)
    assert set(found["robustness"]) == {"obs_noise", "action_noise"}
    with pytest.raises(ValueError, match="best_of_n=4 needs critics"):
        main([str(tmp_path / "plain"), *options, "--best-of-n", "4"])


def test_an_openpi_checkpoint_is_judged_beside_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint that openpi itself wrote, with its statistics, in an environment of its robot's size."""
    checkpoint = openpi_checkpoint(tmp_path)
    sizes = QChunkingConfig(horizon_length=5, action_dim=ARMS)
    save_config(dataclasses.replace(openpi_config(), qchunking=sizes), tmp_path / "tiny.yaml")
    options = ["--env", "arms", "--episodes", "2", "--num-workers", "0", "--json"]
    assert command(["eval", str(checkpoint), "--config", str(tmp_path / "tiny.yaml"), *options]) == 0
    [found] = json.loads(capsys.readouterr().out).values()
    assert (found["episodes"], found["best_of_n"], found["calibration"]) == (2, None, None)
    assert {episode["length"] for episode in found["per_episode"]} == {7}

    with pytest.raises(ValueError, match=r"is a checkpoint of openpi, .* name its config, for example --config aloha"):
        main([str(checkpoint), *options])
    with pytest.raises(ValueError, match="--config is for checkpoints of openpi; found none among"):
        main([str(run), "--config", "aloha", *options])
    both = open_checkpoints([run, checkpoint], load_config(tmp_path / "tiny.yaml"))
    assert [opened.kind for opened in both] == ["run", "openpi"]


class Arms:
    """gymnasium's interface of a robot with as many joints as the statistics of openpi's checkpoint."""

    action_space = SimpleNamespace(low=-np.ones(ARMS, np.float32), high=np.ones(ARMS, np.float32))

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self.joints = np.random.default_rng(seed).uniform(-1, 1, ARMS)
        return self.joints, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.joints = np.asarray(action, np.float64)
        return self.joints, 0.0, False, False, {"success": False}

    def close(self) -> None:
        pass


class ArmsEnv(Env):
    def observation_columns(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        return {"observation.state": raw, "top": np.zeros((16, 16, 3), np.uint8)}


def make_arms(name: str, *, cameras: Any = None, image_size: Any = None, max_episode_steps: int | None = None) -> Env:
    return ArmsEnv(Arms(), name=name, prompt="transfer", fps=10, cameras=cameras, max_episode_steps=7)


register_env("arms", make_arms)
