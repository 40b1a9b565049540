"""The `aloha_sim` preset, small: images from demonstrations through offline and online RL to the report."""

import json
from pathlib import Path

import pytest
from sim_marks import needs_aloha, needs_egl

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.data.sources.source import open_source
from acrlpd.training.demonstrations import collect_missing_demonstrations
from acrlpd.training.experiment import run_experiment
from acrlpd.training.options import RunOptions

SMALL = {
    "batch_size": 4,
    "model.dtype": "float32",
    "model.paligemma_variant": "dummy",
    "model.action_expert_variant": "dummy",
    "model.siglip_variant": "mu/14",
    "model.image_resolution": (28, 28),
    "model.action_horizon": 10,
    "qchunking.horizon_length": 10,
    "critic.num_critics": 2,
    "critic.hidden_dims": (16,),
    "acrlpd.num_action_samples": 2,
    # Two demonstrations of 14 steps have no success that the policy could be cloned from.
    "acrlpd.policy_data": "all",
    "qchunking.success_ratio": None,
    "acrlpd.sampling_steps": 2,
    "data.demonstrations.num_episodes": 2,
    "data.demonstrations.max_episode_steps": 14,
    "env.image_size": (28, 28),
    "env.num_envs": 2,
    "env.max_episode_steps": 10,
    "online.start_steps": 10,
    "training.offline_steps": 2,
    "training.online_steps": 2,
    "training.eval_frequency": 0,
    "training.log_frequency": 1,
    "evaluation.num_episodes": 2,
    "evaluation.best_of_n": 2,
    "evaluation.num_videos": 1,
    "evaluation.baselines": (),
}


@needs_aloha
@needs_egl
def test_the_whole_path_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = apply_config_overrides(get_config("aloha_sim"), SMALL)
    collect_missing_demonstrations(config)
    assert run_experiment(config, RunOptions()) == 0

    run = tmp_path / "checkpoints" / "aloha_sim" / "default"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final_step"] == 4
    assert [summary["evaluation"][phase]["episodes"] for phase in ("offline", "online")] == [2, 2]
    assert summary["online"]["env_steps"] >= 10 + 5  # online.start_steps, and one update at 0.2 updates per step
    # The replay keeps what the policy saw, in all three cameras, frame by frame.
    cameras = open_source("data/aloha_sim").cameras
    assert len(cameras) == 3
    shards = sorted((run / "replay").glob("episode-*.npz"))
    assert len(shards) == summary["online"]["episodes"]
    assert len(list((run / "replay").glob("*.jpegs"))) == 3 * len(shards)
    # There are films, and the report shows frames of them.
    assert len(list((run / "evaluations").rglob("*.mp4"))) == 2
    page = (run / "report.html").read_text()
    assert "data:image" in page, "the film strip is missing"
