"""RLTrainConfig, which includes the seed: two runs with the same config are the same run."""

import dataclasses
from typing import Annotated

from annotated_types import Ge

from acrlpd.agents.backups.base import Backup
from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.critics.base import CriticConfig
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.agents.improvements.awr import AWR
from acrlpd.agents.improvements.base import Improvement
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.optimizers.base import OptimizerConfig
from acrlpd.agents.schedules.base import LRSchedule
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config import run
from acrlpd.config.data import DataConfig
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.families.pi0 import Pi0Config


def _critic_adamw() -> AdamW:
    return AdamW(b2=0.999, weight_decay=0.0)


@dataclasses.dataclass(frozen=True)
class RLTrainConfig:
    """Everything that a run depends on."""

    # Name of the preset; part of the run directory.
    name: str
    # Name of the run; part of the run directory. Does not change what is computed.
    exp_name: str = "default"
    # Seed of everything random: weights, batches, noise, exploration.
    seed: run.Seed = 42
    # Windows per update over all devices and micro-batches. Larger: smoother gradients, slower steps.
    batch_size: Annotated[int, Ge(1)] = 32

    # The policy network.
    model: PolicyConfig = dataclasses.field(default_factory=Pi0Config)
    # Where the policy's weights start from.
    weight_loader: run.WeightLoaderConfig = dataclasses.field(default_factory=run.WeightLoaderConfig)
    # Train only the action expert and the projections; the image encoder and the 2B expert stay fixed in bfloat16.
    # This saves most of the memory, and the policy cannot learn new visual features.
    freeze_pi0_backbone: bool = False

    # The critics' architecture.
    critic: CriticConfig = dataclasses.field(default_factory=MLPCritics)
    # What the critics' targets bootstrap from.
    backup: Backup = dataclasses.field(default_factory=BestOfN)
    acrlpd: ACRLPDHyperparams = dataclasses.field(default_factory=ACRLPDHyperparams)
    # How the critics' values improve the policy, with the weight acrlpd.loss_weights.actor_weight.
    improvement: Improvement = dataclasses.field(default_factory=AWR)
    qchunking: QChunkingConfig = dataclasses.field(default_factory=QChunkingConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    # Policy, critics and temperature each have their own learning rate and optimizer.
    actor_lr_schedule: LRSchedule = dataclasses.field(default_factory=CosineDecaySchedule)
    actor_optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamW)
    critic_lr_schedule: LRSchedule = dataclasses.field(default_factory=ConstantSchedule)
    critic_optimizer: OptimizerConfig = dataclasses.field(default_factory=_critic_adamw)
    temperature_lr_schedule: LRSchedule = dataclasses.field(default_factory=ConstantSchedule)
    temperature_optimizer: OptimizerConfig = dataclasses.field(default_factory=_critic_adamw)

    training: run.TrainingConfig = dataclasses.field(default_factory=run.TrainingConfig)
    env: run.EnvConfig = dataclasses.field(default_factory=run.EnvConfig)
    online: run.OnlineConfig = dataclasses.field(default_factory=run.OnlineConfig)
    evaluation: run.EvaluationConfig = dataclasses.field(default_factory=run.EvaluationConfig)
    fsdp: run.FSDPConfig = dataclasses.field(default_factory=run.FSDPConfig)
    openpi_compatibility: run.OpenPICompatibilityConfig = dataclasses.field(
        default_factory=run.OpenPICompatibilityConfig
    )
    logging: run.LoggingConfig = dataclasses.field(default_factory=run.LoggingConfig)
    checkpoints: run.CheckpointConfig = dataclasses.field(default_factory=run.CheckpointConfig)

    @property
    def num_train_steps(self) -> int:
        """Updates over both phases."""
        return self.training.offline_steps + self.training.online_steps

    @property
    def freezes_policy(self) -> bool:
        """Whether the policy keeps its initial weights, because the improvement wants this."""
        return self.acrlpd.loss_weights.actor_weight > 0 and self.improvement.freezes_policy

    @property
    def noise_dim(self) -> int | None:
        """Numbers in the noise of a chunk, where critics judge noise in place of chunks; None elsewhere."""
        judges_noise = self.acrlpd.loss_weights.actor_weight > 0 and self.improvement.judges_noise
        return self.improvement.noise_dim(self.model) if judges_noise else None

    @property
    def labels_prompts(self) -> bool:
        """Whether the policy reads prompts that say how good the actions to come are."""
        return self.acrlpd.loss_weights.actor_weight > 0 and self.improvement.labels_prompts

    @property
    def acts_with_average(self) -> bool:
        """Whether the policy that acts, and that openpi serves, is the moving average of the policy that learns."""
        return self.openpi_compatibility.enable_ema_for_inference and self.acrlpd.ema_decay is not None
