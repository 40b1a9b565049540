"""Methods that have networks of their own, as whole runs: offline, online and resumed."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_helpers import arrays_of, assert_equal_arrays, metrics_of, online_config, train_here

from acrlpd.config import apply_config_overrides, validate_config
from acrlpd.runs.directory import run_directory, saved_steps
from acrlpd.training.checkpoints.reader import load_checkpoint_agent

ONE_CANDIDATE = {"acrlpd__num_action_samples": 1, "acrlpd__loss_weights__actor_weight": 1.0}
QC_FQL = ONE_CANDIDATE | {"improvement": "distillation", "improvement__hidden_dims": [16], "offline_steps": 4}
# Online from the start.
RLPD_AC = ONE_CANDIDATE | {
    "model": "gaussian",
    "model__hidden_dims": [16],
    "improvement": "sac",
    "acrlpd__loss_weights__bc_weight": 0.0,
    "offline_steps": 0,
}

DECOUPLED = {"backup": "decoupled", "backup__hidden_dims": [16], "offline_steps": 4}
DECOUPLED |= {"qchunking__critic_action_horizon": 2}
EXPO = QC_FQL | {"improvement": "expo", "acrlpd__num_action_samples": 4}
DSRL = QC_FQL | {"improvement": "dsrl", "acrlpd__loss_weights__bc_weight": 0.0}
DSRL_SAC = DSRL | {"improvement": "dsrl_sac", "offline_steps": 0, "online__offline_ratio": 0.0}
METHODS = {
    # Interrupted between two updates of the policy, at step 8.
    "qc_fql": (QC_FQL | {"acrlpd__critic_updates_per_policy_update": 3}, "improvement"),
    "rlpd_ac": (RLPD_AC, "improvement"),
    "decoupled": (DECOUPLED, "backup"),
    "expo": (EXPO, "improvement"),
    # Its critics cannot value the logged chunks of held-out episodes.
    "dsrl_sac": (DSRL_SAC | {"data__validation_share": 0.25}, "improvement"),
}


def test_dsrl_steers_the_policy_of_another_run_and_keeps_it(tmp_path: pathlib.Path) -> None:
    cloning = online_config(tmp_path, exp_name="cloning", offline_steps=4, online_steps=0)
    train_here(cloning)
    start = run_directory(cloning) / "4"
    loader = {"weight_loader__kind": "checkpoint", "weight_loader__path": str(start)}
    config = online_config(tmp_path, exp_name="steered", online_steps=4, **DSRL, **loader)
    assert not validate_config(config).errors
    train_here(config)
    agents = [load_checkpoint_agent(directory)[0] for directory in (start, run_directory(config) / "8")]
    cloned, kept = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), agent.served_params()) for agent in agents)
    assert len(jax.tree.leaves(agents[1].frozen_params)) == len(jax.tree.leaves(cloned)) > 0
    jax.tree.map(np.testing.assert_array_equal, kept, cloned)


# A backup with networks of its own, and an improvement that has networks and keeps more in the replay.
ALWAYS = ("decoupled", "dsrl_sac")


@pytest.mark.parametrize(
    ("changes", "learning"),
    [
        pytest.param(*method, id=name, marks=() if name in ALWAYS else pytest.mark.slow)
        for name, method in METHODS.items()
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(changes: dict[str, Any], learning: str, tmp_path: pathlib.Path) -> None:
    config = online_config(
        tmp_path,
        exp_name="straight",
        online_steps=8,
        log_frequency=2,
        save_frequency=4,
        checkpoints__max_to_keep=2,
        **changes,
    )
    train_here(config)
    straight = run_directory(config)
    lines = metrics_of(straight)
    assert any("eval/success_rate" in line for line in lines)
    [*_, last] = [line for line in lines if "actor_loss" in line]
    assert last[f"{learning}_grad_norm"] > 0 and last["skipped_updates"] == 0

    resumed = apply_config_overrides(config, exp_name="resumed")
    *_, interrupted, end = saved_steps(straight)
    assert 0 < end - interrupted < 8  # in the middle of the online phase
    shutil.copytree(straight, run_directory(resumed))  # as a kill leaves it that comes before the last checkpoint
    shutil.rmtree(run_directory(resumed) / str(end))
    train_here(resumed, resume=True)
    assert metrics_of(run_directory(resumed)) == lines
    assert_equal_arrays(arrays_of(run_directory(resumed) / str(end)), arrays_of(straight / str(end)))
