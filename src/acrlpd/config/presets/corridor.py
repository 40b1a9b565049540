"""RL against imitation without a simulator, in seconds on a CPU: the example in Python trains this.

A point is to go to the right end of a corridor, and half of the demonstrations go to the wrong end. Cloning them all
succeeds in about half of the episodes. `awr` clones what the critics find good. No candidate is chosen by the critics
when the policy acts, so success shows what the policy itself has learned.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RewardConfig
from acrlpd.config.run import EnvConfig, EvaluationConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

CONFIG = RLTrainConfig(
    name="corridor",
    batch_size=32,
    model=StateFlowPolicyConfig(state_dim=2, action_dim=2, action_horizon=4, hidden_dims=(64, 64)),
    critic=MLPCritics(num_critics=2, hidden_dims=(64, 64), use_pi0_features=False),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=1.0, bc_weight=0.0),
        num_action_samples=4,
        sampling_steps=4,
        discount=0.9,
        target_update_tau=0.05,
        ema_decay=0.98,
    ),
    qchunking=QChunkingConfig(horizon_length=4, action_dim=2),
    data=DataConfig(
        data_dir="./data/corridor",
        default_prompt="go right",
        rewards=RewardConfig(kind="minus_one_zero"),
        demonstrations=DemonstrationsConfig(num_episodes=60, quality="mixed"),
        validation_share=0.0,  # judged in its environment
    ),
    actor_lr_schedule=ConstantSchedule(2e-3),
    critic_lr_schedule=ConstantSchedule(2e-3),
    training=TrainingConfig(offline_steps=400, eval_frequency=0, log_frequency=50, save_frequency=400),
    env=EnvConfig(id="corridor", num_envs=4),
    evaluation=EvaluationConfig(num_episodes=25, best_of_n=1, baselines=("bc",)),
)
