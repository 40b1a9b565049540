"""The weights of cloning and improvement on their way through the online phase."""

import pathlib

import numpy as np
import pytest
from training_helpers import metrics_of, online_config, train_here

from acrlpd.runs.directory import run_directory
from acrlpd.training.online.loss_weights import scheduled_weights

MOVING = {
    "acrlpd__loss_weights__bc_weight": 1.0,
    "acrlpd__loss_weights__actor_weight": 0.5,
    "online__final_bc_weight": 0.2,
    "online__final_actor_weight": 2.5,
    "online__bc_weight_decay_steps": 4,
}


def test_both_weights_move_linearly_and_stay(tmp_path: pathlib.Path) -> None:
    config = online_config(tmp_path, **MOVING)
    offline, online = scheduled_weights(config, None, 2), scheduled_weights(config, 2, 4)
    assert offline["bc_weights"].tolist() == [1.0, 1.0] and offline["actor_weights"].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(online["bc_weights"], [0.6, 0.4, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(online["actor_weights"], [1.5, 2.0, 2.5, 2.5], rtol=1e-6)
    at_once = scheduled_weights(online_config(tmp_path, **MOVING | {"online__bc_weight_decay_steps": 0}), 0, 1)
    assert at_once["actor_weights"].tolist() == [2.5]
    fixed = scheduled_weights(online_config(tmp_path), 5, 2)
    assert fixed.keys() == {"bc_weights"}  # the compiled update is the one of a run without this schedule


def test_the_improvement_gains_weight_in_a_run(tmp_path: pathlib.Path) -> None:
    config = online_config(tmp_path, offline_steps=2, online_steps=6, log_frequency=1, **MOVING)
    train_here(config)
    lines = [line for line in metrics_of(run_directory(config)) if "actor_weight" in line]
    assert [line["actor_weight"] for line in lines] == pytest.approx([0.5, 0.5, 0.5, 1.0, 1.5, 2.0, 2.5, 2.5])
    for line in lines:
        parts = line["critic_loss"], line["bc_weight"] * line["bc_loss"], line["actor_weight"] * line["actor_loss"]
        assert line["total_loss"] == pytest.approx(sum(parts), rel=1e-4)
