"""A user's robot with units of its own, from its dataset to what openpi's users are told."""

from pathlib import Path

import numpy as np
import pytest

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, get_config, validate_config
from acrlpd.config.yaml_files import parse_config
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.data.pipeline.norm_stats import NormStatsError
from acrlpd.data.pipeline.transforms import create_policy_transforms
from acrlpd.data.sources.source import Feature, open_source
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.policies.checkpoint import Checkpoint
from acrlpd.policies.levels import serving_level
from acrlpd.robots.base import ServingLevel
from acrlpd.serving.export_readme import write_readme
from acrlpd.serving.requests import RequestError, create_observation_spec

LENGTH = 24
SCALE = np.array([np.pi / 180] * 6 + [1 / 50])  # of a gripper that opens 50 mm


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLTrainConfig:
    """Four episodes of an arm in degrees and millimetres, and a config that names the robot."""
    folder, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    features = {
        "camera.front": Feature("video", (32, 32, 3)),
        "arm.joints": Feature("float32", (6,)),
        "arm.gripper": Feature("float32", ()),
        "arm.command": Feature("float32", (7,)),
        "next.success": Feature("bool", ()),
    }
    with LeRobotWriter(folder / "data", fps=10, features=features, codec="h264") as writer:
        for _ in range(4):
            for t in range(LENGTH):
                joints, gripper = rng.uniform(-90, 90, 6).astype(np.float32), np.float32(rng.uniform(0, 50))
                columns = {
                    "arm.joints": joints,
                    "arm.gripper": gripper,
                    "arm.command": np.append(joints + rng.normal(0, 5, 6), gripper).astype(np.float32),
                    "next.success": np.bool_(t == LENGTH - 1),
                }
                writer.add_step(columns, {"camera.front": rng.integers(0, 256, (32, 32, 3), np.uint8)})
            writer.end_episode("reach")
    changes = {
        "data.robot": "own_arm:OwnArm",
        "data.robot.opening_mm": 50.0,
        "data.repo_id": None,
        "data.data_dir": str(folder / "data"),
        "data.assets_dir": str(folder / "assets"),
        "data.repack.base_0_rgb": "camera.front",
        "data.repack.state": ["arm.joints", "arm.gripper"],
        "data.repack.actions": ["arm.command"],
        "data.use_delta_joint_actions": True,
        "data.num_workers": 0,
        "qchunking.action_dim": 7,
        "batch_size": 8,
    }
    config = apply_config_overrides(get_config("debug"), changes)
    write_norm_stats(config)
    return config


def column(config: RLTrainConfig, name: str) -> np.ndarray:
    assert config.data.data_dir is not None
    return open_source(config.data.data_dir).read_columns([name]).columns[name].reshape(4 * LENGTH, -1)


def states(config: RLTrainConfig) -> np.ndarray:
    return np.concatenate([column(config, "arm.joints"), column(config, "arm.gripper")], axis=1)


def test_a_yaml_file_names_it(config: RLTrainConfig) -> None:
    text = "base_config: debug\ndata: {robot: {type: 'own_arm:OwnArm', opening_mm: 50.0}}\n"
    assert parse_config(text, "own.yaml").data.robot == config.data.robot
    with pytest.raises(ConfigError, match=r"data.robot must be one of aloha, droid, generic, libero, or module:Name"):
        apply_config_overrides(config, {"data.robot": "own_arm"})


def test_norm_statistics_are_in_the_units_of_the_model(config: RLTrainConfig) -> None:
    norm_stats = open_dataset(config).norm_stats
    assert norm_stats is not None
    np.testing.assert_allclose(norm_stats["state"].mean, (states(config) * SCALE).mean(axis=0), rtol=1e-5)
    # The first six dims of an action are relative to the state.
    assert np.abs(norm_stats["actions"].mean[:6]).max() < 1 and norm_stats["actions"].mean[6] == pytest.approx(
        norm_stats["state"].mean[6], rel=0.1
    )


def test_statistics_of_another_opening_are_refused(config: RLTrainConfig) -> None:
    with pytest.raises(NormStatsError, match=r"robot.opening_mm: statistics 50.0, this run 80.0"):
        open_dataset(apply_config_overrides(config, {"data.robot.opening_mm": 80.0}))


def test_what_is_trained_is_what_is_served(config: RLTrainConfig) -> None:
    """A client that sends the state of a step gets the inputs of training, and its actions in its own units."""
    dataset, transforms = open_dataset(config), create_policy_transforms(config, long_prompts="refuse")
    assert dataset.norm_stats is not None
    inputs, outputs = transforms.serving_inputs(dataset.norm_stats), transforms.serving_outputs(dataset.norm_stats)
    spec = create_observation_spec(config, dataset.norm_stats)
    commands, all_states = column(config, "arm.command"), states(config)
    with create_data_loader(config) as loader:
        batch = loader.sample_batch()
    for k in range(len(batch.step_id)):
        row = int(batch.episode_id[k]) * LENGTH + int(batch.step_id[k])
        state, image = all_states[row], batch.observations.images["base_0_rgb"][k]
        observation = spec.check(
            {"joints": state[:6], "gripper": state[6], "images": {"front": image}, "prompt": "reach"}
        )
        found = inputs(observation)
        np.testing.assert_allclose(found["state"], batch.observations.state[k], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found["image"]["base_0_rgb"], image)
        np.testing.assert_array_equal(found["tokenized_prompt"], batch.observations.tokenized_prompt[k])
        actions = outputs({"state": batch.observations.state[k], "actions": batch.actions[k]})["actions"]
        valid = int(batch.valid[k].sum())
        np.testing.assert_allclose(actions[:valid], commands[row : row + valid], rtol=1e-4, atol=1e-3)


def test_the_server_refuses_other_observations(config: RLTrainConfig) -> None:
    spec = create_observation_spec(config, None)
    good = {"joints": np.zeros(6), "gripper": 0.5, "images": {"front": np.zeros((32, 32, 3), np.uint8)}, "prompt": "x"}
    assert spec.check(good)["gripper"].shape == (1,)
    for change, message in (
        ({"joints": np.zeros(7)}, r"joints must be 6 numbers; found shape \[7\]"),
        ({"images": {}}, "lacks 'images/front'"),
    ):
        with pytest.raises(RequestError, match=message):
            spec.check(good | change)


def test_its_checks_and_its_level(config: RLTrainConfig) -> None:
    assert validate_config(config, ready_to_train=True).errors == ()
    wrong = {"qchunking.action_dim": 6, "data.repack.state": ["arm.joints"]}
    errors = validate_config(apply_config_overrides(config, wrong)).errors
    assert "qchunking.action_dim 6 does not fit robot own_arm:OwnArm, which has 7 action dims" in errors
    assert any("must name a column for each of joints, gripper of robot own_arm:OwnArm" in error for error in errors)
    level = serving_level(config, "standard")
    assert (level.num_steps, level.best_of_n) == (5, 2)


def test_what_an_export_tells_openpis_users(config: RLTrainConfig, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "export", config, ServingLevel(5, 1, 0), 7, has_critics=False)
    write_readme(tmp_path, checkpoint, "standard")
    readme = (tmp_path / "README.md").read_text()
    assert "data=YourDataConfig(" in readme
    assert "as the class `own_arm:OwnArm` of acrlpd does, and the first 7 action dims come out" in readme
    assert f"with the mask {(True,) * 6 + (False,)}" in readme
