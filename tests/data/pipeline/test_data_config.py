"""The data part of a config by itself: paths and limits."""

import dataclasses
import logging

import pytest
from data_pipeline_helpers import SIZE, with_data

from acrlpd.agents.improvements.recap import RECAP
from acrlpd.config import DataConfig, RewardConfig, validate_config
from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.pipeline.config_episodes import open_config_source
from acrlpd.data.pipeline.config_norm_stats import norm_stats_dir
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.dataset_checks import find_dataset_errors
from acrlpd.data.pipeline.held_out_choice import held_out_episodes
from acrlpd.data.sources.source import DatasetError, EpisodeError


def test_home_in_paths(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "set").symlink_to(config.data.data_dir)
    data = DataConfig(data_dir="~/set", assets_dir="~/assets", frame_cache_dir="~/cache", tokenizer="~/t.model")
    assert (data.data_dir, data.frame_cache_dir) == (f"{tmp_path}/set", f"{tmp_path}/cache")
    assert data.tokenizer == f"{tmp_path}/t.model"
    assert RewardConfig(labels_file="~/labels.json").labels_file == f"{tmp_path}/labels.json"
    assert norm_stats_dir(data).parent == tmp_path / "assets"
    changed = with_data(config, data_dir="~/set")
    assert len(open_config_source(changed)) == 6
    assert validate_config(changed, ready_to_train=True).errors == validate_config(config, ready_to_train=True).errors


@pytest.mark.parametrize("max_episodes", [0, -1])
def test_at_least_one_episode(config, max_episodes):
    errors = validate_config(with_data(config, max_episodes=max_episodes)).errors
    assert f"data.max_episodes must be at least 1; found {max_episodes}" in errors


def test_a_prompt_that_is_too_long_with_its_label_is_found_before_the_run_begins(config):
    """A token of the tokenizer `byte` is a byte. The longest task has 25, and its label 20 more."""
    assert find_dataset_errors(config) == []
    short, long = (
        dataclasses.replace(config, improvement=RECAP(), model=dataclasses.replace(config.model, max_token_len=length))
        for length in (40, 80)
    )
    assert find_dataset_errors(long) == []
    errors = find_dataset_errors(short)
    assert len(errors) == 1 and "Raise model.max_token_len, or shorten the prompt" in errors[0]
    with pytest.raises(DatasetError, match="the prompt with its label, cannot be used"):
        open_dataset(short)


def test_episodes_that_the_frame_cache_lacks_are_named_and_not_held_out(config, tmp_path, monkeypatch, caplog):
    config = with_data(config, frame_cache_dir=str(tmp_path), on_bad_episode="skip", validation_share=0.2)
    source = open_config_source(config)
    (lost,) = held_out_episodes(source.indices, 0.2)
    read = source.read_frames

    def read_frames(index, camera, ts):
        if index == lost and camera == "wrist_image":
            raise EpisodeError("noise", path=source.root, episode=index, frame=0, camera=camera)
        return read(index, camera, ts)

    monkeypatch.setattr(source, "read_frames", read_frames)
    assert list(build_frame_cache(source, tmp_path, height=SIZE, width=SIZE)) == [lost]
    with caplog.at_level(logging.WARNING), open_dataset(config) as dataset:
        (held_out,) = dataset.held_out_indices
        assert {*dataset.source.indices, held_out} == {*source.indices} - {lost}
    (message,) = [text for text in caplog.messages if "left out" in text]
    assert message.startswith("1 of 6 episodes are broken and left out") and f"episode {lost}, frame 0" in message
    with open_dataset(with_data(config, max_episodes=lost + 1, validation_share=0.0)) as dataset:
        assert dataset.source.indices == source.indices[:lost]
