"""Folding a box with ALOHA on 8 devices: full fine-tune of pi0 with FSDP, rewards from the dataset.

There are three cameras, chunks of 20 steps and the prompt "fold the box". Joints keep the conventions of the dataset
(adapt_to_pi is off), and the dataset has a column `reward`. The model pads the robot's 14 action dims to 32. Bring the
data with `--lerobot_repo_id` or `--data_dir`.

By the plan, the run takes 1.9 hours and 194 GiB of disk on eight H100. Each device holds an eighth of the state, so
GPUs of 24 GB are large enough. On eight devices 64 windows take hardly longer than 32. The checkpoints of the middle
and of the end are kept. `aloha_fold_seeds` is the run that this preset comes from.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, RewardConfig
from acrlpd.config.presets import aloha
from acrlpd.config.run import CheckpointConfig, FSDPConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

ALIASES = ("rl_fold_box",)

CONFIG = RLTrainConfig(
    name="aloha_fold",
    batch_size=64,
    model=Pi0Config(action_horizon=20),
    weight_loader=aloha.CONFIG.weight_loader,
    critic=MLPCritics(num_critics=10, hidden_dims=(512, 512, 512), dropout_rate=0.1),
    acrlpd=ACRLPDHyperparams(loss_weights=LossWeights(bc_weight=0.05), num_action_samples=4, discount=0.99),
    qchunking=QChunkingConfig(horizon_length=20, action_dim=14, sequence_ratio=0.8),
    data=DataConfig(
        robot=Aloha(),
        repack=aloha.CONFIG.data.repack,
        rewards=RewardConfig(source="reward_column", reward_column="reward"),
        use_delta_joint_actions=True,
        prompt_from_task=False,
        default_prompt="fold the box",
    ),
    actor_lr_schedule=CosineDecaySchedule(peak_lr=3e-5, decay_steps=20_000, decay_lr=3e-6),
    actor_optimizer=AdamW(weight_decay=1e-4),
    critic_lr_schedule=CosineDecaySchedule(peak_lr=3e-4, decay_steps=20_000, decay_lr=3e-5),
    critic_optimizer=AdamW(b2=0.999, weight_decay=1e-4),
    training=TrainingConfig(offline_steps=20_000, eval_frequency=1_000, save_frequency=1_000),
    checkpoints=CheckpointConfig(keep_period=10_000),
    fsdp=FSDPConfig(fsdp_devices=8),
    openpi_compatibility=aloha.CONFIG.openpi_compatibility,
)
