"""A run as the online phase leaves it, with its replay and its baselines, goes to the robot like any other."""

import json
from pathlib import Path

import pytest
from serving_helpers import state_observation
from small_checkpoints import state_config

from acrlpd.cli.main import main
from acrlpd.config import RLTrainConfig, apply_config_overrides, save_config
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.serving.serving_policy import load_serving_policy

OFFLINE, ONLINE = 2, 3


def acrlpd(*args: str | Path) -> None:
    """A command in this process; it must succeed."""
    assert main([*map(str, args)]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    config: RLTrainConfig = apply_config_overrides(
        state_config(),
        {
            "batch_size": 8,
            "env.id": "toy_env:toy",
            "training.offline_steps": OFFLINE,
            "training.online_steps": ONLINE,
            "online.start_steps": 10,
            "evaluation.num_episodes": 2,
            "evaluation.baselines": ["bc"],
            "checkpoints.directory": str(folder),
            "logging.wandb": "disabled",
        },
    )
    save_config(config, folder / "toy.yaml")
    acrlpd("train", "--config", folder / "toy.yaml")
    return folder / "small" / "default"


def test_the_newest_checkpoint_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"baselines", "replay"} <= {path.name for path in run.iterdir()}
    acrlpd("export", run, "--output", tmp_path / "out", "--level", "fast")
    assert "verified: actions differ" in capsys.readouterr().out
    checkpoint = open_checkpoint(tmp_path / "out")
    assert (checkpoint.step, checkpoint.level.num_critics) == (OFFLINE + ONLINE, 3)
    policy = load_serving_policy(checkpoint)
    [reply] = policy.infer([policy.prepare(state_observation())])
    assert isinstance(reply, dict) and len(reply["best_of_n"]["q_values"]) == 4


def test_a_cloned_policy_has_no_critics_to_choose_by(run: Path, tmp_path: Path) -> None:
    """Cloning trains no critic: the best of N under random numbers would be worse than the first."""
    checkpoint = open_checkpoint(run / "baselines" / "bc")
    assert not checkpoint.has_critics and checkpoint.level.best_of_n == 1
    acrlpd("export", run / "baselines" / "bc", "--output", tmp_path / "bc")
    assert json.loads((tmp_path / "bc" / "acrlpd.json").read_text())["critics"] is None
    assert not (tmp_path / "bc" / "critic").exists()
