"""From real datasets to batches: every number and every pixel against the episode it came from."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from data_pipeline_helpers import MODEL, H, T, assert_equal, batches, decode_identity, with_data

from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, RewardConfig, RLTrainConfig
from acrlpd.config.presets import debug
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.data.pipeline.norm_stats import NormStatsError, load_norm_stats
from acrlpd.data.sources.source import DatasetError, open_source
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.robots.aloha import Aloha
from acrlpd.robots.droid import Droid
from acrlpd.robots.generic import Generic


def test_every_field_of_a_batch(config):
    source = open_source(config.data.data_dir)
    stats = load_norm_stats(config.data.assets_dir + "/libero")
    seen_ends = 0
    for batch in batches(config, 4):
        for k in range(config.batch_size):
            episode = source.episode(int(batch.episode_id[k]))
            t, length = int(batch.step_id[k]), episode.length
            next_t = min(t + H, length - 1)
            for observation, step in ((batch.observations, t), (batch.next_observations, next_t)):
                assert decode_identity(observation.images["base_0_rgb"][k]) == (episode.index, step, 0)
                assert decode_identity(observation.images["left_wrist_0_rgb"][k]) == (episode.index, step, 1)
                state = (episode.columns["state"][step] - stats["state"].mean) / (stats["state"].std + 1e-6)
                np.testing.assert_allclose(observation.state[k, :8], state, rtol=1e-5, atol=1e-6)
                assert not observation.state[k, 8:].any()
                tokens = observation.tokenized_prompt[k][observation.tokenized_prompt_mask[k]]
                assert bytes((tokens[1:] - 3).tolist()).decode() == episode.prompt + "\n"
            steps = np.minimum(np.arange(t, t + T), length - 1)
            actions = episode.columns["actions"][steps]
            actions = (actions - stats["actions"].mean) / (stats["actions"].std + 1e-6)
            np.testing.assert_allclose(batch.actions[k, :, :7], actions, rtol=1e-5, atol=1e-6)
            assert not batch.actions[k, :, 7:].any()
            success = length != 61
            terminal = [float(success and t + i == length - 1) for i in range(H)]
            assert batch.valid[k].tolist() == [float(t + i < length) for i in range(T)]
            assert batch.terminals[k].tolist() == terminal
            assert batch.rewards[k].tolist() == [0.0 if t + i >= length else terminal[i] - 1.0 for i in range(H)]
            assert batch.next_terminal[k] == max(terminal)
            assert batch.sequence_mask[k] == float(max(terminal) == 1.0 or t + H < length)
            seen_ends += max(terminal) == 1.0
    assert seen_ends > 5
    assert {key: x.dtype for key, x in batch.observations.images.items()} == dict.fromkeys(MODEL.image_keys, np.uint8)


def test_statistics_need_no_tokenizer_file(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changed = with_data(config, tokenizer="paligemma", assets_dir=str(tmp_path))
    _, stats = write_norm_stats(changed)
    assert stats["actions"].dim == 7
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        create_data_loader(changed)


def test_lerobot_v21_and_v30_give_equal_batches(libero_configs):
    assert_equal(batches(libero_configs["v21"], 3), batches(libero_configs["v30"], 3))


def test_video_and_reward_columns(aloha, tmp_path):
    """The two versions were encoded separately: the frames are the same, their pixels nearly so."""
    found = {}
    for version, path in aloha.items():
        config = RLTrainConfig(
            name="test",
            batch_size=8,
            model=dataclasses.replace(MODEL, image_resolution=(240, 320), image_keys=("base_0_rgb",)),
            qchunking=QChunkingConfig(horizon_length=H, action_dim=14, sequence_ratio=0.25),
            data=DataConfig(
                data_dir=str(path),
                robot=Aloha(adapt_to_pi=True),
                use_delta_joint_actions=True,
                repack=RepackConfig(base_0_rgb="observation.images.cam_high"),
                assets_dir=str(tmp_path / version),
                tokenizer="byte",
                episodes_per_memory_pool=0,
            ),
        )
        write_norm_stats(config)
        found[version] = batches(config, 2)
    v21, v30 = (jax.tree.leaves(found[version]) for version in ("v21", "v30"))
    for x, y in zip(v21, v30, strict=True):
        if x.dtype == np.uint8:
            assert np.abs(x.astype(int) - y).mean() < 3
        else:
            np.testing.assert_array_equal(x, y)
    for batch in found["v30"]:
        for k in range(8):
            episode, t = int(batch.episode_id[k]), int(batch.step_id[k])
            length = 100 + episode * 37 % 60
            image, next_image = (o.images["base_0_rgb"][k] for o in (batch.observations, batch.next_observations))
            assert decode_identity(image) == (episode, t, 0)
            assert decode_identity(next_image) == (episode, min(t + H, length - 1), 0)
            succeeds = episode % 4 != 3
            assert batch.rewards[k].tolist() == [float(succeeds and t + i == length - 1) for i in range(H)]
            assert batch.next_terminal[k] == float(succeeds and t + H >= length)


def test_droid_state_is_joints_and_gripper(droid, tmp_path):
    config = RLTrainConfig(
        name="test",
        batch_size=4,
        model=dataclasses.replace(MODEL, image_resolution=(28, 28)),
        qchunking=QChunkingConfig(horizon_length=H, action_dim=8, sequence_ratio=1.0),
        data=DataConfig(
            data_dir=str(droid),
            robot=Droid(),
            repack=RepackConfig(
                base_0_rgb="exterior_image_1_left",
                left_wrist_0_rgb="wrist_image_left",
                state=("joint_position", "gripper_position"),
                actions=("actions",),
            ),
            assets_dir=str(tmp_path),
            tokenizer="byte",
            episodes_per_memory_pool=0,
        ),
    )
    _, stats = write_norm_stats(config)
    (batch,) = batches(config, 1)
    source = open_source(droid)
    for k in range(4):
        columns = source.episode(int(batch.episode_id[k])).columns
        t = int(batch.step_id[k])
        state = np.append(columns["joint_position"][t], columns["gripper_position"][t])
        expected = (state - stats["state"].mean) / (stats["state"].std + 1e-6)
        np.testing.assert_allclose(batch.observations.state[k, :8], expected, rtol=1e-4, atol=1e-5)


def test_fake_data_for_the_debug_preset():
    config = with_data(debug.CONFIG, num_workers=1)
    (batch,) = batches(config, 1)
    assert batch.observations.images["base_0_rgb"].shape == (8, 28, 28, 3)
    assert batch.actions.shape == (8, 10, 32)
    assert batch.rewards.shape == (8, 5)


def test_a_policy_on_state_alone():
    config = dataclasses.replace(
        debug.CONFIG,
        model=StateFlowPolicyConfig(state_dim=9, action_dim=5, action_horizon=T),
        qchunking=QChunkingConfig(horizon_length=H, action_dim=5),
        data=DataConfig(repo_id="fake", num_workers=0),
    )
    (batch,) = batches(config, 1)
    assert batch.observations.images == {}
    assert batch.observations.tokenized_prompt is None
    assert batch.observations.state.shape == (8, 9)
    assert batch.actions.shape == (8, T, 5)


def test_rewards_of_the_whole_dataset(config):
    with create_data_loader(config) as loader:
        dataset = loader.dataset
    lengths = open_source(config.data.data_dir).lengths
    np.testing.assert_array_equal(np.diff(dataset.table.offsets), lengths)
    assert dataset.rewards.success.mean() == 5 / 6
    assert dataset.rewards.rewards.sum() == -(lengths.sum() - 5)


def test_episodes_can_be_chosen(config):
    (batch,) = batches(with_data(config, episode_filter="success"), 1, batch_size=200)
    assert {*batch.episode_id.tolist()} == {0, 1, 2, 4, 5}
    (batch,) = batches(with_data(config, max_episodes=2), 1)
    assert {*batch.episode_id.tolist()} == {0, 1}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"assets_dir": "/nowhere"}, NormStatsError, r"/nowhere/libero.*acrlpd data stats"),
        ({"use_delta_joint_actions": True}, NormStatsError, "delta_action_mask: statistics absolute actions"),
        ({"data_dir": None}, DatasetError, "set data.data_dir .* or data.repo_id"),
        ({"repack": RepackConfig(state=("state",), actions=("actions",))}, DatasetError, "names no camera"),
        (
            {"repack": RepackConfig(base_0_rgb="top", state=("state",), actions=("actions",))},
            DatasetError,
            r"names the camera 'top'; .* has \['image', 'wrist_image'\]",
        ),
        (
            {"repack": RepackConfig(base_0_rgb="image", actions=("actions",))},
            DatasetError,
            "no column 'observation.state'",
        ),
        (
            {"robot": Generic(), "repack": RepackConfig(base_0_rgb="image", state=("actions",), actions=("state",))},
            DatasetError,
            "have 8 dims, but qchunking.action_dim is 7",
        ),
        (
            {"repack": RepackConfig(base_0_rgb="image", state=("actions",), actions=("state",))},
            ValueError,
            "'observation/state' of robot libero has 8 dims",
        ),
        ({"rewards": RewardConfig()}, DatasetError, "says nothing about rewards"),
        ({"rewards": RewardConfig(labels_file="/nowhere.json")}, DatasetError, "no such file"),
        ({"prompt_from_task": False}, DatasetError, "default_prompt"),
    ],
)
def test_what_does_not_fit_is_refused(config, change, error, message):
    with pytest.raises(error, match=message):
        create_data_loader(with_data(config, **change))


def test_a_camera_slot_without_a_camera_is_named(config, caplog):
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(MODEL, image_keys=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")),
    )
    with caplog.at_level(logging.WARNING):
        (batch,) = batches(config, 1)
    assert "no camera is given for ['right_wrist_0_rgb']" in caplog.text
    assert not batch.observations.image_masks["right_wrist_0_rgb"].any()
    assert not batch.observations.images["right_wrist_0_rgb"].any()
