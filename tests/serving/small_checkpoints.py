"""Tiny configs and agents, and the checkpoints that are made of them."""

import dataclasses
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy_agent import NORM_STATS, toy_config, toy_pi0_config

from acrlpd.agents import Agent
from acrlpd.config import DataConfig, MLPCritics, RepackConfig, RLTrainConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.norm_stats import NormStats, save_norm_stats
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.policies.acting_model import ActingModel, acting_model
from acrlpd.policies.policy import create_policy
from acrlpd.serving.serving_policy import ServingPolicy, create_serving_policy
from acrlpd.training.checkpoints.writer import CheckpointWriter

GOLDENS = Path(__file__).parents[1] / "goldens"


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
    critic = MLPCritics(num_critics=5, hidden_dims=(16,), pooling="attention")
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


def save_run(directory: Path, rl_config: RLTrainConfig, agents: dict[int, Agent], *, norm_stats: bool = True) -> Path:
    """A run directory with a checkpoint of each agent."""
    directory.mkdir(parents=True, exist_ok=True)
    assets = {}
    if norm_stats:
        stats = directory.parent / f"{directory.name}-stats"
        save_norm_stats(stats, NORM_STATS)
        assets[f"{rl_config.data.asset_id}/norm_stats.json"] = (stats / "norm_stats.json").read_bytes()
    keep_all = dataclasses.replace(rl_config.checkpoints, max_to_keep=10)
    writer = CheckpointWriter(directory, dataclasses.replace(rl_config, checkpoints=keep_all), assets)
    for step, agent in agents.items():
        writer.save(agent, step, rng=jax.random.key(0), state={})
    writer.close()
    return directory


def serve(
    model: ActingModel,
    rl_config: RLTrainConfig,
    norm_stats: Mapping[str, NormStats] | None,
    best_of_n: int,
    **options: Any,
) -> ServingPolicy:
    """A model behind a server; prompts are refused where they are too long, as `load_serving_policy` does."""
    policy = create_policy(model, rl_config, norm_stats, best_of_n=best_of_n, long_prompts="refuse")
    return create_serving_policy(policy, **options)


def served_model(agent: Agent) -> ActingModel:
    """What is served of an agent of `make_agent`: its moving average and its critics."""
    return acting_model(agent, average=state_config().acts_with_average)
