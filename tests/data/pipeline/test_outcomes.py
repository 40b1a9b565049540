"""Settings that need successes or failures are refused where the data has none."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.dataset_checks import check_outcomes
from acrlpd.data.pipeline.labels import Labels
from acrlpd.data.sources.source import DatasetError, open_source
from acrlpd.data.tools.label import label_rule

NEVER, SOMETIMES, ALWAYS = "length < 0", "length < 60", "length > 0"


def labelled(config: RLTrainConfig, folder: Path, rule: str, **changes: Any) -> RLTrainConfig:
    """The config with labels by this rule."""
    assert config.data.data_dir is not None
    labels = Labels(folder / "labels.json", label_rule(open_source(config.data.data_dir), rule))
    labels.save()
    rewards = dataclasses.replace(config.data.rewards, labels_file=str(labels.path))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, rewards=rewards))
    changes = {"training.online_steps": 0} | {name.replace("__", "."): value for name, value in changes.items()}
    return apply_config_overrides(config, changes)


SUCCESS = {"acrlpd__policy_data": "success"}
SHARE = {"qchunking__success_ratio": 0.5}


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        (NEVER, SUCCESS, r"policy_data success: the 6 episodes of the data have no success.*acrlpd data label"),
        (
            ALWAYS,
            SUCCESS,
            r"the 6 episodes of the data are all successes.*changes nothing\. Set acrlpd\.policy_data all",
        ),
        (NEVER, SHARE, r"qchunking\.success_ratio 0\.5: none of the 6 episodes of the data is a success"),
        (NEVER, SUCCESS | SHARE, "have no success"),
    ],
)
def test_data_that_cannot_serve_is_refused(
    config: RLTrainConfig, tmp_path: Path, rule: str, changes: dict[str, Any], message: str
) -> None:
    config = labelled(config, tmp_path, rule, **changes)
    for check in (open_dataset, check_outcomes):
        with pytest.raises(DatasetError, match=message):
            check(config)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (SOMETIMES, SUCCESS | SHARE),
        (ALWAYS, SHARE),
        (ALWAYS, SUCCESS | {"training__online_steps": 5}),  # The online phase may add failures.
        (NEVER, {}),
    ],
)
def test_data_that_serves_is_accepted(
    config: RLTrainConfig, tmp_path: Path, rule: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = labelled(config, tmp_path, rule, **changes)
    with caplog.at_level(logging.WARNING):
        check_outcomes(config)
    assert not caplog.messages


def test_a_reward_of_failures_that_nobody_has_labelled_is_reported(
    config: RLTrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_outcomes(labelled(config, tmp_path, SOMETIMES, data__rewards__failure_reward=-10.0))
        assert not caplog.messages
        check_outcomes(labelled(config, tmp_path, ALWAYS, data__rewards__failure_reward=-10.0))
    (message,) = caplog.messages
    assert message.startswith(
        "data.rewards.failure_reward -10: no episode of the data is known to have failed (successes: 6, failures: 0"
    )
