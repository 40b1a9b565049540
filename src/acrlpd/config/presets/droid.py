"""DROID, full fine-tune of pi0: large and diverse manipulation data, one arm, 8 action dims.

The data are rich and the tasks are many, so learning rates are conservative, the ensemble of critics is large and
pessimistic, and cloning is moderate. The model pads actions to 32 dims and prompts to 48
tokens, as the released weights need; the robot's 8 dims stand in `qchunking`. DROID has no third camera, so its slot
is not computed. Bring your own data (`--lerobot_repo_id` or `--data_dir`). For an online phase, bring an environment
(`--env.id`) and say how long it is (`--online_steps`).

By the plan, the run takes 7.6 hours and 194 GiB of disk on one H100, and 66 of its 80 GiB of memory. As in openpi's
fine-tunings there are 30,000 updates of 32 windows; every update has 8 candidates. The checkpoints of the middle and of
the end are kept. `droid_seeds` is the long run that this preset comes from.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import CheckpointConfig, OpenPICompatibilityConfig, TrainingConfig, WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.droid import Droid

ALIASES = ("rl_droid",)

CONFIG = RLTrainConfig(
    name="droid",
    batch_size=32,
    model=Pi0Config(action_horizon=10, image_keys=("base_0_rgb", "left_wrist_0_rgb")),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi0_droid/params"),
    critic=MLPCritics(num_critics=10, hidden_dims=(512, 512, 256), dropout_rate=0.1, q_aggregation="min"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(bc_weight=0.01),
        num_action_samples=8,
        discount=0.995,
        target_update_tau=0.005,
    ),
    qchunking=QChunkingConfig(horizon_length=10, action_dim=8, sequence_ratio=0.7),
    data=DataConfig(
        robot=Droid(),
        repack=RepackConfig(
            base_0_rgb="exterior_image_1_left",
            left_wrist_0_rgb="wrist_image_left",
            state=("joint_position", "gripper_position"),
            actions=("actions",),
        ),
        episodes_per_memory_pool=50,
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=3e-5, decay_steps=30_000, decay_lr=3e-6),
    actor_optimizer=AdamW(weight_decay=1e-4),
    critic_lr_schedule=CosineDecaySchedule(warmup_steps=1_000, peak_lr=5e-4, decay_steps=30_000, decay_lr=5e-5),
    critic_optimizer=AdamW(b2=0.999, weight_decay=1e-4),
    training=TrainingConfig(offline_steps=30_000, eval_frequency=1_500, save_frequency=1_500),
    checkpoints=CheckpointConfig(keep_period=15_000),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi0_droid"),
)
