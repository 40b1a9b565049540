"""Tiny served policies, the checkpoints they come from, and a server in a thread."""

import asyncio
import concurrent.futures
import dataclasses
import http.client
import tarfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("websockets", reason="websockets is missing: pip install 'acrlpd[serve]'")

from toy_agent import NORM_STATS, toy_config, toy_pi0_config
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from acrlpd.agents import Agent
from acrlpd.config import DataConfig, MLPCritics, RepackConfig, RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.norm_stats import save_norm_stats
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.policies.served_model import ServedModel
from acrlpd.serving.message_format import packb, unpackb
from acrlpd.serving.server import PolicyServer, ServerOptions
from acrlpd.serving.serving_policy import ServingPolicy, create_serving_policy
from acrlpd.training.checkpoints.manager import CheckpointWriter

GOLDENS = Path(__file__).parents[1] / "goldens"

STATE_DIM = 3


@contextmanager
def quick_compiles() -> Iterator[None]:
    """XLA without most of its optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def state_config(**changes: Any) -> RLTrainConfig:
    """The smallest thing that can be served: no image, no prompt. Five critics, so that some can be left out."""
    fields: dict[str, Any] = {
        "name": "small",
        "critic": MLPCritics(num_critics=5, hidden_dims=(16,), use_pi0_features=False),
        "data": DataConfig(repo_id="fake", asset_id="robot", tokenizer="byte"),
    }
    return toy_config(**(fields | changes))


def pi0_config(**changes: Any) -> RLTrainConfig:
    """A pi0 with one camera and a prompt."""
    data = DataConfig(
        repo_id="fake",
        asset_id="lab/robot",
        repack=RepackConfig(base_0_rgb="observation.images.top"),
        default_prompt="go",
        tokenizer="byte",
    )
    critic = MLPCritics(num_critics=5, hidden_dims=(16,))
    return toy_pi0_config(**({"name": "small", "data": data, "critic": critic} | changes))


def openpi_config() -> RLTrainConfig:
    """What openpi's golden checkpoint is."""
    model = Pi0Config(
        dtype="float32",
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        action_horizon=10,
        max_token_len=16,
        remat_policy="none",
    )
    data = DataConfig(tokenizer="byte", default_prompt="go", repack=RepackConfig(base_0_rgb="top"))
    return pi0_config(model=model, data=data)


def openpi_checkpoint(folder: Path) -> Path:
    """The checkpoint that openpi itself wrote."""
    with tarfile.open(GOLDENS / "ckpt_openpi_tiny_pi0_ema.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    [step] = [path.parent for path in folder.rglob("params") if path.parent.name == "100"]
    return step


def make_agent(rl_config: RLTrainConfig, seed: int = 0) -> Agent:
    """Random numbers everywhere, moving average included; nothing is compiled."""
    abstract = jax.eval_shape(lambda key: create_agent(rl_config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(values, abstract)


def save_run(directory: Path, rl_config: RLTrainConfig, agents: dict[int, Agent]) -> Path:
    """A run directory with a checkpoint of each agent."""
    directory.mkdir(parents=True, exist_ok=True)
    stats = directory.parent / f"{directory.name}-stats"
    save_norm_stats(stats, NORM_STATS)
    assets = {f"{rl_config.data.asset_id}/norm_stats.json": (stats / "norm_stats.json").read_bytes()}
    keep_all = dataclasses.replace(rl_config.checkpoints, max_to_keep=10)
    writer = CheckpointWriter(directory, dataclasses.replace(rl_config, checkpoints=keep_all))
    for step, agent in agents.items():
        writer.save(agent, step, rng=jax.random.key(0), assets=assets, state={})
    writer.close()
    return directory


def pi0_observation(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What a robot sends to a policy of `pi0_config`."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (40, 56, 3), np.uint8)
    return {"state": rng.standard_normal(STATE_DIM), "images": {"base_0_rgb": image}, "prompt": "go left"} | changes


def state_observation(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What a robot sends to a policy of `state_config`."""
    return {"state": np.random.default_rng(seed).standard_normal(STATE_DIM).astype(np.float32)} | changes


def served_model(agent: Agent) -> ServedModel:
    """What is served of an agent."""
    return ServedModel(
        params=nnx.merge_state(agent.ema_params, agent.frozen_params),
        critic_params=agent.critics.online,
        policy_def=agent.policy_def,
        critic_def=agent.critics.network,
        algorithm=agent.algorithm,
    )


def state_policy(seed: int = 0, **options: Any) -> ServingPolicy:
    """A warm policy of `state_config`."""
    config = state_config()
    options = {"best_of_n": 4, "num_steps": (2, 1), "max_batch_size": 8} | options
    policy = create_serving_policy(served_model(make_agent(config, seed)), config, NORM_STATS, **options)
    policy.warm_up()
    return policy


class RunningServer:
    """A server with its own event loop in a thread, on a free port of the loopback interface."""

    def __init__(self, policy: ServingPolicy, **options: Any) -> None:
        self._policy, self._options = policy, ServerOptions(port=0, **options)

    def __enter__(self) -> "RunningServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _run(self, started: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.server = PolicyServer(self._policy, self._options)
        await self.server.start()
        started.set()
        await self._stop.wait()
        await self.server.drain()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}"

    def connect(self, **options: Any) -> Connection:
        """A plain websocket that has taken the metadata."""
        connection = connect(self.url, compression=None, max_size=None, **options).__enter__()
        connection.recv(timeout=30)
        return connection

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text of a plain HTTP request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def scrape(self, **headers: str) -> dict[str, float]:
        """What /metrics says: 'name{label="value"}' -> number."""
        status, text = self.get("/metrics", **headers)
        assert status == 200
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


def ask(connection: Connection, message: Any) -> Any:
    """The reply, or the text of an error."""
    connection.send(message if isinstance(message, (bytes, str)) else packb(message))
    reply = connection.recv(timeout=60)
    return reply if isinstance(reply, str) else unpackb(reply)
