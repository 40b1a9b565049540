"""Transfer a cube in simulation (gym-aloha): a small pi0 from scratch, three cameras, offline then online.

The quick start with images, on one GPU: scripted demonstrations of mixed quality (collected at the first
start, about an hour of one core), offline RL, online RL, and what both are compared with. The policy has
pi0's architecture at a fraction of its size and reads prompts as bytes, so nothing needs to be downloaded.
Rendering needs EGL.
"""

from acrlpd.config.algorithm import ACRLPDHyperparams, CriticConfig, LossWeights, QChunkingConfig
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RepackConfig, RewardConfig
from acrlpd.config.optimizers import ConstantSchedule, CosineDecaySchedule
from acrlpd.config.run import EnvConfig, EvaluationConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.pi0_config import Pi0Config

CONFIG = RLTrainConfig(
    name="aloha_sim",
    batch_size=64,
    model=Pi0Config(
        paligemma_variant="gemma_300m",
        action_expert_variant="gemma_300m",
        siglip_variant="S/14",
        vocab_size=512,
        action_horizon=20,
    ),
    critic=CriticConfig(num_critics=4, hidden_dims=(512, 512, 512), q_aggregation="mean"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0), num_action_samples=8, learnable_temperature=False
    ),
    qchunking=QChunkingConfig(horizon_length=20, action_dim=14, sequence_ratio=0.7),
    data=DataConfig(
        data_dir="./data/aloha_sim",
        robot="aloha",
        asset_id="aloha_sim",
        repack=RepackConfig(
            base_0_rgb="observation.images.top",
            left_wrist_0_rgb="observation.images.left_wrist",
            right_wrist_0_rgb="observation.images.right_wrist",
        ),
        # The environment's own reward pays more for staying at the last stage than for finishing.
        rewards=RewardConfig(source="success_column"),
        demonstrations=DemonstrationsConfig(num_episodes=200),
        default_prompt="Transfer cube",
        tokenizer="byte",
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=1e-4, decay_steps=30_000, decay_lr=1e-5),
    critic_lr_schedule=ConstantSchedule(3e-4),
    training=TrainingConfig(offline_steps=20_000, online_steps=10_000, eval_frequency=5_000),
    env=EnvConfig(id="gym_aloha/AlohaTransferCube-v0", num_envs=8, max_episode_steps=300),
    evaluation=EvaluationConfig(
        num_episodes=50, best_of_n=16, baselines=("bc", "bc_success_only", "offline_continued"), num_videos=2
    ),
)
