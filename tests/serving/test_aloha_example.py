"""The example client moves a simulated ALOHA with a served policy."""

import ctypes.util
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from serving_helpers import RunningServer
from small_checkpoints import make_agent, pi0_config, serve, served_model

from acrlpd.config import DataConfig, EnvConfig, QChunkingConfig, RepackConfig
from acrlpd.robots.aloha import Aloha

EXAMPLE = Path(__file__).parents[2] / "examples" / "aloha_sim_client.py"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("openpi_client") is None,
        reason="openpi-client is missing: pip install --no-deps openpi-client",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("gym_aloha") is None, reason="gym-aloha is missing: pip install 'acrlpd[sim]'"
    ),
    pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="libEGL is missing: apt-get install libegl1"),
]


def test_the_example_plays_episodes() -> None:
    base = pi0_config()
    # As in the preset `aloha_sim`: a short prompt and small images.
    data = DataConfig(
        robot=Aloha(),
        tokenizer="byte",
        prompt_from_task=False,
        default_prompt="cube",
        repack=RepackConfig(base_0_rgb="observation.images.top"),
    )
    config = pi0_config(
        data=data,
        model=type(base.model)(**{**vars(base.model), "action_dim": 16, "max_token_len": 8}),
        qchunking=QChunkingConfig(horizon_length=3, action_dim=14),
        env=EnvConfig(id="gym_aloha/AlohaTransferCube-v0", image_size=(28, 28)),
    )
    policy = serve(served_model(make_agent(config)), config, None, best_of_n=2, num_steps=(1,))
    policy.warm_up()
    with RunningServer(policy) as server:
        options = ["--port", str(server.server.port), "--episodes", "2", "--max_episode_steps", "6"]
        finished = subprocess.run(
            [sys.executable, str(EXAMPLE), *options],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stderr
        assert "connected: small, step None, best of 2" in finished.stdout
        assert "episode 1: failure (0 of 2)" in finished.stdout
        assert server.scrape()['acrlpd_requests_total{result="ok"}'] == 4
