"""Q-chunking from state, with the settings of its paper: OGBench cube-double, 37 state dims, 5 action dims.

Chunks have 5 steps. The flow policy only clones the data; what improves it is the choice of the best of 32 candidates
under two critics, in targets and when it acts. There are a million updates offline and a million online, one update
per environment step, and half of each online batch comes from the dataset. The policy computes in bfloat16; the
critics compute in float32, except when they rank the candidates of a target. Bring the dataset with `--data_dir`.

Three things differ from the paper's code: flow times are drawn as openpi draws them (Beta(1.5, 1)) instead of
uniformly, candidates are not clipped to [-1, 1] before the critics see them, and states and actions are normalised.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import EnvConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

# The paper's Adam: no weight decay, and a limit of the gradient norm that is never reached.
_ADAM = AdamW(b2=0.999, weight_decay=0.0, clip_gradient_norm=1e6)

CONFIG = RLTrainConfig(
    name="qc_cube_double",
    batch_size=256,
    model=StateFlowPolicyConfig(
        dtype="bfloat16", state_dim=37, action_dim=5, action_horizon=5, hidden_dims=(512, 512, 512, 512)
    ),
    critic=MLPCritics(num_critics=2, hidden_dims=(512, 512, 512, 512), q_aggregation="mean"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=32,
        sampling_steps=10,
        discount=0.99,
        target_update_tau=0.005,
        learnable_temperature=False,
        ema_decay=None,
    ),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=0.95),
    # The state is OGBench's own vector, as in the paper.
    data=DataConfig(asset_id="cube_double", repack=RepackConfig(state=("observation.raw_state",))),
    actor_lr_schedule=ConstantSchedule(3e-4),
    actor_optimizer=_ADAM,
    critic_lr_schedule=ConstantSchedule(3e-4),
    critic_optimizer=_ADAM,
    training=TrainingConfig(
        offline_steps=1_000_000,
        online_steps=1_000_000,
        eval_frequency=100_000,
        log_frequency=5_000,
        save_frequency=100_000,
    ),
    env=EnvConfig(id="cube-double-play-singletask-v0"),
    online=OnlineConfig(offline_ratio=0.5, update_to_data_ratio=1.0, start_steps=5_000),
)
