"""The critics that a checkpoint and an export choose with, where the run averages its critics."""

from pathlib import Path

import jax
import numpy as np
from small_checkpoints import make_agent, save_run, state_config

from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.serving.export import export_policy
from acrlpd.training.checkpoints.reader import load_checkpoint_agent


def averaging_config() -> RLTrainConfig:
    return apply_config_overrides(state_config(), {"acrlpd.critic_ema_decay": 0.9})


def arrays(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_average_is_stored_served_and_exported(tmp_path: Path) -> None:
    agent = make_agent(averaging_config())
    run = save_run(tmp_path / "run", averaging_config(), {4: agent})
    resumed, _ = load_checkpoint_agent(run)
    assert jax.tree.structure(resumed) == jax.tree.structure(agent)
    for found, expected in zip(arrays(resumed), arrays(agent), strict=True):
        np.testing.assert_array_equal(found, expected)
    export_policy(run, tmp_path / "out", critics="all")
    for path in (run, tmp_path / "out"):
        critics = open_checkpoint(path).load_model().critics
        assert critics is not None
        for found, expected in zip(arrays(critics.online), arrays(agent.critics.average), strict=True):
            np.testing.assert_array_equal(found, expected)
