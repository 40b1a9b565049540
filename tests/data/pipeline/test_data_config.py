"""The data part of a config by itself: paths and limits."""

import pytest
from data_pipeline_helpers import with_data

from acrlpd.config import DataConfig, RewardConfig, validate_config
from acrlpd.data.pipeline.dataset import norm_stats_dir, open_config_source


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
