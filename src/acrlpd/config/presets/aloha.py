"""ALOHA, frozen backbone: fine-tune the action expert of pi0 for a bimanual robot, 14 action dims.

The image encoder and the 2B expert keep the released weights; the action expert, the projections and the critics
learn. Learning rates are small, cloning is very weak, and a small ensemble of critics is averaged: the preset trusts
the pretrained policy and sharpens it. The model pads actions to 32 dims and prompts to 48 tokens, as the released
weights need; the robot's 14 dims stand in `qchunking`. Bring your own data (`--lerobot_repo_id` or `--data_dir`) and,
for the online phase, an environment (`--env.id`).
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import OpenPICompatibilityConfig, TrainingConfig, WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

CONFIG = RLTrainConfig(
    name="aloha",
    batch_size=128,
    model=Pi0Config(action_horizon=20),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi0_base/params"),
    freeze_pi0_backbone=True,
    critic=MLPCritics(
        num_critics=8,
        hidden_dims=(256, 256, 128),
        dropout_rate=0.05,
        q_aggregation="mean",
        feature_fusion_method="mlp",
    ),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(bc_weight=0.001),
        num_action_samples=32,
        discount=0.99,
        target_update_tau=0.01,
    ),
    qchunking=QChunkingConfig(horizon_length=20, action_dim=14, sequence_ratio=0.8),
    data=DataConfig(
        robot=Aloha(adapt_to_pi=True),
        repack=RepackConfig(
            base_0_rgb="observation.images.cam_high",
            left_wrist_0_rgb="observation.images.cam_left_wrist",
            right_wrist_0_rgb="observation.images.cam_right_wrist",
        ),
        use_delta_joint_actions=True,
        episodes_per_memory_pool=30,
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=2_000, peak_lr=5e-6, decay_steps=30_000, decay_lr=1e-6),
    actor_optimizer=AdamW(weight_decay=1e-4),
    critic_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=1e-4, decay_steps=25_000, decay_lr=1e-5),
    critic_optimizer=AdamW(b2=0.999, weight_decay=1e-4),
    training=TrainingConfig(
        offline_steps=500_000, online_steps=100_000, save_frequency=5_000, gradient_accumulation_steps=2
    ),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi0_aloha", reset_pose=(0.0, -1.5, 1.5, 0.0, 0.0, 0.0)),
)
