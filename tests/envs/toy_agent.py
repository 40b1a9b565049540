"""A tiny agent for the toy environment."""

from functools import partial
from typing import Any

import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.config import (
    ACRLPDHyperparams,
    DataConfig,
    EnvConfig,
    EvaluationConfig,
    MLPCritics,
    QChunkingConfig,
    RepackConfig,
    RLTrainConfig,
)
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

NORM_STATS = {
    "state": NormStats(np.array([0.5, 5.0, 1.0]), np.array([0.3, 3.0, 1.0])),
    "actions": NormStats(np.array([0.4, 0.0]), np.array([0.5, 1.0])),
}


def toy_config(**changes: Any) -> RLTrainConfig:
    """A state-space policy with 4 steps per chunk."""
    fields: dict[str, Any] = {
        "name": "toy",
        "model": StateFlowPolicyConfig(state_dim=3, action_dim=2, action_horizon=4, hidden_dims=(16,)),
        "critic": MLPCritics(num_critics=2, hidden_dims=(16,), use_pi0_features=False),
        "acrlpd": ACRLPDHyperparams(num_action_samples=4, sampling_steps=2),
        "qchunking": QChunkingConfig(horizon_length=3, action_dim=2),
        "data": DataConfig(data_dir="toy", default_prompt="go right", tokenizer="byte"),
        "env": EnvConfig(id="toy", num_envs=2),
        "evaluation": EvaluationConfig(num_episodes=6, seed=100, noise_levels=(0.1,), best_of_n_values=(1, 4)),
    }
    return RLTrainConfig(**(fields | changes))


def toy_pi0_config(**changes: Any) -> RLTrainConfig:
    """A pi0 that looks at the toy's camera."""
    model = Pi0Config(
        dtype="float32",
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        action_dim=8,
        action_horizon=4,
        max_token_len=16,
        image_resolution=(28, 28),
        image_keys=("base_0_rgb",),
        remat_policy="none",
    )
    data = DataConfig(
        data_dir="toy",
        repack=RepackConfig(base_0_rgb="observation.images.side"),
        tokenizer="byte",
        use_delta_joint_actions=True,
        delta_action_mask=(1, -1),
    )
    return toy_config(**({"model": model, "data": data} | changes))


def toy_agent(rl_config: RLTrainConfig, seed: int = 0) -> Agent:
    create = partial(create_agent, rl_config)
    return jax.jit(create)(jax.random.key(seed))  # one compile instead of one per operation
