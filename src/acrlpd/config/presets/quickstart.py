"""The quick start: RL against imitation on a laptop CPU, OGBench cube-single from state.

A tiny pi0 (prompt and state tokens, no camera) on demonstrations of mixed quality; chunks of 5 steps,
reward -1 until success. Runs on 2 cores without a GPU and without a download.
"""

from acrlpd.config.algorithm import ACRLPDHyperparams, CriticConfig, LossWeights, QChunkingConfig
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RewardConfig
from acrlpd.config.optimizers import AdamW, ConstantSchedule
from acrlpd.config.run import EnvConfig, EvaluationConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.pi0_config import Pi0Config

CONFIG = RLTrainConfig(
    name="quickstart",
    batch_size=64,
    model=Pi0Config(
        dtype="float32",
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        action_horizon=5,
        max_token_len=16,
        image_keys=(),
        remat_policy="none",
    ),
    critic=CriticConfig(num_critics=2, hidden_dims=(256, 256, 256), q_aggregation="mean"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=4,
        sampling_steps=5,
        learnable_temperature=False,
    ),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=0.7),
    data=DataConfig(
        data_dir="./data/quickstart",
        asset_id="quickstart",
        rewards=RewardConfig(kind="minus_one_zero"),
        demonstrations=DemonstrationsConfig(num_episodes=80, max_episode_steps=100),
        default_prompt="move the cube",
        tokenizer="byte",
    ),
    actor_lr_schedule=ConstantSchedule(1e-3),
    actor_optimizer=AdamW(b2=0.999, weight_decay=0.0),
    critic_lr_schedule=ConstantSchedule(3e-4),
    training=TrainingConfig(offline_steps=1_500, online_steps=1_000, eval_frequency=0, save_frequency=500),
    env=EnvConfig(id="cube-single-play-singletask-v0", num_envs=16),
    online=OnlineConfig(start_steps=500),
    evaluation=EvaluationConfig(num_episodes=50),
)
