"""ALOHA, frozen backbone: fine-tune the action expert of pi0 for a bimanual robot, 14 action dims.

The image encoder and the 2B expert keep the released weights; the action expert, the projections and the critics
learn. Learning rates are small, cloning is very weak, and a small ensemble of critics is averaged: the preset trusts
the pretrained policy and sharpens it. The model pads actions to 32 dims and prompts to 48 tokens, as the released
weights need; the robot's 14 dims stand in `qchunking`. Bring your own data (`--lerobot_repo_id` or `--data_dir`). For
an online phase, bring an environment (`--env.id`) and say how long it is (`--online_steps`).

By the plan, the run takes 6 hours and 51 GiB of disk on one H100. It fits a GPU of 24 GB. As in openpi's fine-tunings
there are 30,000 updates of 32 windows. Every update has 8 candidates; with 32 it would take twice as long. Without a
simulator nobody knows which checkpoint is the best, so three are kept. `aloha_seeds` is the long run that this preset
comes from.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import CheckpointConfig, OpenPICompatibilityConfig, TrainingConfig, WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

CONFIG = RLTrainConfig(
    name="aloha",
    batch_size=32,
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
        num_action_samples=8,
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
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=5e-6, decay_steps=30_000, decay_lr=1e-6),
    actor_optimizer=AdamW(weight_decay=1e-4),
    critic_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=1e-4, decay_steps=30_000, decay_lr=1e-5),
    critic_optimizer=AdamW(b2=0.999, weight_decay=1e-4),
    training=TrainingConfig(offline_steps=30_000, eval_frequency=1_000, save_frequency=1_000),
    checkpoints=CheckpointConfig(keep_period=10_000),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi0_aloha", reset_pose=(0.0, -1.5, 1.5, 0.0, 0.0, 0.0)),
)
