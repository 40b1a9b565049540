"""Whether a config may continue a run: the diff, what is free to change, what is allowed by name."""

import json
import pathlib
from typing import Any

import jax
import pytest
from training_helpers import metrics_of, state_config, train_here

from acrlpd.checksums import write_checksums
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.runs.directory import run_directory
from acrlpd.training.checkpoints.metadata import check_resume, create_checkpoint_metadata, restore_rng

STATS = {"robot/norm_stats.json": b"{}"}


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> tuple[pathlib.Path, RLTrainConfig]:
    config = state_config(tmp_path)
    metadata = create_checkpoint_metadata(config, 10, average=True, assets=STATS)
    write_run_file(tmp_path / "10", metadata | {"rng": {"impl": "threefry2x32", "data": [0, 3]}})
    (tmp_path / "10" / "assets" / "robot").mkdir(parents=True)
    (tmp_path / "10" / "assets" / "robot" / "norm_stats.json").write_bytes(STATS["robot/norm_stats.json"])
    return tmp_path / "10", config


def write_run_file(directory: pathlib.Path, metadata: dict[str, Any]) -> None:
    """A run.json as it was saved: its checksum is right."""
    (directory / "run").mkdir(parents=True, exist_ok=True)
    (directory / "run" / "run.json").write_text(json.dumps(metadata))
    write_checksums(directory / "run")


def changed(directory: pathlib.Path, **overrides: object) -> RLTrainConfig:
    return state_config(directory.parent, **overrides)


def test_the_same_config(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    assert check_resume(*saved, STATS) == {}


def test_a_checkpoint_that_is_older_than_a_field(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    directory, config = saved
    path = directory / "run" / "run.json"
    metadata = json.loads(path.read_text())
    del metadata["config"]["online"]["episodes_per_round"]
    write_run_file(directory, metadata)
    assert check_resume(directory, config, STATS) == {}
    other = changed(directory, online__episodes_per_round=3)
    assert set(check_resume(directory, other, STATS, ["online"])) == {"online.episodes_per_round"}


def test_a_run_from_before_episodes_were_held_out_goes_on_with_all_episodes(
    saved: tuple[pathlib.Path, RLTrainConfig],
) -> None:
    directory, config = saved
    metadata = json.loads((directory / "run" / "run.json").read_text())
    del metadata["config"]["data"]["validation_share"]
    write_run_file(directory, metadata)
    assert config.data.validation_share > 0
    with pytest.raises(ConfigError, match=r"validation_share: 0\.0 -> 0\.05(.|\n)*with --data\.validation_share 0\.0$"):
        check_resume(directory, config, STATS)
    assert check_resume(directory, changed(directory, data__validation_share=0.0), STATS) == {}


def test_a_changed_config_is_refused_with_a_diff(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    directory, _ = saved
    config = changed(directory, seed=7, critic_lr_schedule__peak_lr=1e-5)
    with pytest.raises(ConfigError) as error:
        check_resume(directory, config, STATS)
    message = str(error.value)
    assert "seed: 42 -> 7" in message
    assert "critic_lr_schedule.peak_lr: 0.0003 -> 1e-05" in message
    assert "--allow_changed seed critic_lr_schedule.peak_lr" in message


def test_changes_are_allowed_by_the_name_of_a_field_or_a_section(
    saved: tuple[pathlib.Path, RLTrainConfig],
) -> None:
    directory, _ = saved
    config = changed(directory, offline_steps=500, critic_lr_schedule__peak_lr=1e-5)
    changes = check_resume(directory, config, STATS, ["critic_lr_schedule", "training.offline_steps"])
    assert changes == {"critic_lr_schedule.peak_lr": (0.0003, 1e-5), "training.offline_steps": (20, 500)}
    with pytest.raises(ConfigError, match=r"offline_steps: 20 -> 500"):
        check_resume(directory, config, STATS, ["critic_lr_schedule"])


def test_an_unknown_name_is_refused(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    with pytest.raises(ConfigError, match=r"no field of the config: critic_lr$"):
        check_resume(*saved, STATS, ["critic_lr"])


def test_placement_and_speed_are_free_to_change(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    directory, _ = saved
    config = changed(directory, exp_name="other", fsdp_devices=8, data__num_workers=9, gradient_accumulation_steps=2)
    free = {"exp_name", "fsdp.fsdp_devices", "data.num_workers", "training.gradient_accumulation_steps"}
    assert set(check_resume(directory, config, STATS)) == free


def test_a_run_with_norm_statistics_does_not_go_on_without(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    """Fake data, which a changed config may name, has no statistics."""
    with pytest.raises(ConfigError, match=r"robot/norm_stats.json is not what .* was trained with"):
        check_resume(*saved, {})


def test_other_norm_statistics_are_refused(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    with pytest.raises(ConfigError, match=r"robot/norm_stats.json is not what .* was trained with"):
        check_resume(*saved, {"robot/norm_stats.json": b"{ }"})


def test_norm_statistics_of_the_checkpoint_itself_are_verified(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    """A later `acrlpd serve` would act with the statistics of the checkpoint, not with those of the run."""
    own = saved[0] / "assets" / "robot" / "norm_stats.json"
    own.write_bytes(b"{ }")
    expected = r"expected the SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}\nCopy the file from another checkpoint"
    with pytest.raises(CheckpointError, match=rf"{own} has changed since it was written: {expected}"):
        check_resume(*saved, STATS)
    own.unlink()
    with pytest.raises(CheckpointError, match=f"{own} is missing"):
        check_resume(*saved, STATS)


def test_the_random_key_comes_back(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    metadata = json.loads((saved[0] / "run" / "run.json").read_text())
    assert restore_rng(metadata) == jax.random.key(3)


def test_another_format_or_no_checkpoint_is_named(saved: tuple[pathlib.Path, RLTrainConfig]) -> None:
    directory, config = saved
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):
        check_resume(directory.parent, config, STATS)
    path = directory / "run" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        check_resume(directory, config, STATS)


def test_loss_weights_and_a_fixed_temperature_that_were_changed_take_effect(tmp_path: pathlib.Path) -> None:
    """Both are arrays of the agent, and the checkpoint has those of the config before."""
    config = state_config(tmp_path, offline_steps=5, acrlpd__loss_weights__bc_weight=1.0)
    train_here(config)
    weights = {"acrlpd__loss_weights__bc_weight": 0.25, "acrlpd__loss_weights__critic_weight": 0.5}
    other = state_config(tmp_path, offline_steps=10, acrlpd__initial_temperature=3.0, **weights)
    allowed = ["training.offline_steps", "acrlpd.loss_weights", "acrlpd.initial_temperature"]
    train_here(other, resume=True, allow_changed=tuple(allowed))
    before, after = metrics_of(run_directory(config))
    assert (before["bc_weight"], before["alpha_value"]) == (1.0, 1.0)
    assert (after["bc_weight"], after["alpha_value"]) == (0.25, pytest.approx(3.0))
    expected = 0.25 * after["bc_loss"] + 0.5 * after["critic_loss"]
    assert after["total_loss"] == pytest.approx(expected, rel=1e-5)
