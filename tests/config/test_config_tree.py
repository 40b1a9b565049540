"""Configs as plain data, as checkpoints and exports keep them."""

import json

import pytest

from acrlpd.config import ConfigError, RLTrainConfig, get_config, list_configs, to_dict
from acrlpd.config.tree import from_dict


@pytest.mark.parametrize("name", sorted(list_configs()))
def test_every_preset_survives_json(name: str) -> None:
    config = get_config(name)
    assert from_dict(RLTrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_a_field_that_the_data_does_not_have_gets_its_default() -> None:
    data = to_dict(get_config("aloha"))
    del data["openpi_compatibility"]["reset_pose"]
    del data["online"]
    older = from_dict(RLTrainConfig, data)
    assert older.openpi_compatibility.reset_pose is None
    assert older.openpi_compatibility.config_name == "pi0_aloha"
    assert older.online == RLTrainConfig(name="x").online


def test_a_kind_of_section_that_this_version_does_not_have() -> None:
    data = to_dict(get_config("debug"))
    data["model"]["type"] = "pi1"
    with pytest.raises(
        ConfigError, match=r"model must be one of gaussian, pi0, pi0_fast, state_flow, or module:Name .*; found 'pi1'"
    ):
        from_dict(RLTrainConfig, data)
