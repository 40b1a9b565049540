"""LIBERO, full fine-tune of pi0: simulated one-arm tasks, 7 action dims, short chunks, offline and then online.

Simulation is cheap, so a third of the updates are made online; strong cloning and a large pessimistic ensemble of
critics keep them stable. The model pads actions to 32 dims and prompts to 48 tokens, as the released weights need; the
robot's 7 dims stand in `qchunking`. LIBERO has no right wrist camera, so its slot is not computed.

By the plan, the run takes 7.6 hours and 147 GiB of disk on one H100; playing and evaluations come on top. Chunks are
short, so 16 candidates are cheap. The policy learns at 5e-5, openpi's rate for LIBERO with pi0.5; openpi has 2.5e-5 for
pi0. The best checkpoint by evaluation is kept beside the newest. `libero_seeds` is the long run that this preset comes
from.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import (
    CheckpointConfig,
    EnvConfig,
    OpenPICompatibilityConfig,
    TrainingConfig,
    WeightLoaderConfig,
)
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.libero import Libero

ALIASES = ("rl_libero",)

CONFIG = RLTrainConfig(
    name="libero",
    batch_size=32,
    model=Pi0Config(action_horizon=5, image_keys=("base_0_rgb", "left_wrist_0_rgb")),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi0_base/params"),
    critic=MLPCritics(num_critics=12, hidden_dims=(512, 512, 256, 128), dropout_rate=0.15, q_aggregation="min"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(bc_weight=0.1),
        num_action_samples=16,
        discount=0.98,
        target_update_tau=0.01,
    ),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=7, sequence_ratio=0.6),
    data=DataConfig(
        repo_id="physical-intelligence/libero",
        robot=Libero(),
        repack=RepackConfig(base_0_rgb="image", left_wrist_0_rgb="wrist_image", state=("state",), actions=("actions",)),
        use_delta_joint_actions=True,
        episodes_per_memory_pool=100,
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=5e-5, decay_steps=30_000, decay_lr=5e-6),
    actor_optimizer=AdamW(weight_decay=1e-4),
    critic_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=1e-3, decay_steps=30_000, decay_lr=1e-4),
    critic_optimizer=AdamW(b2=0.999, weight_decay=1e-4),
    training=TrainingConfig(offline_steps=20_000, online_steps=10_000, save_frequency=2_500),
    env=EnvConfig(id="libero_spatial"),
    checkpoints=CheckpointConfig(keep_period=None),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi0_libero"),
)
