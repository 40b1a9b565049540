"""The quick start: RL against imitation on a laptop CPU, OGBench cube-single from state.

A tiny pi0 (prompt and state tokens, no camera) learns from 160 scripted demonstrations. Every demonstration first moves
the cube to some other place, and three of four then move it to the right place. The policy has 100 steps, which is too
few for the detour, and the reward is -1 until the policy succeeds. Imitation makes the detour, also imitation of the
successes alone. Critics learn from all demonstrations which chunks of 5 steps lead to an early success, and choose the
best of 16 chunks of the policy, which clones what leads to a success. Offline RL is followed by online RL, and both are
compared with cloning and with more offline RL. Two cores are enough; there is no GPU and no download.

The targets are those of an implicit value: they need no candidates, so an update takes less than half of the time, and
a run has time for more updates. The study of benchmarks/tune-2026-11-18.md, made with `acrlpd tune`, chose the peaks of
the learning rates, the number of critics and their minimum, tau, kappa, and 16 candidates. The learning rate of the
policy decays, because at a constant rate the policy gets worse. docs/quickstart.md says what else was tried.
"""

from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RewardConfig
from acrlpd.config.run import CheckpointConfig, EnvConfig, EvaluationConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = RLTrainConfig(
    name="quickstart",
    batch_size=64,
    model=Pi0Config(
        dtype="float32",
        paligemma_variant="tiny",
        action_expert_variant="tiny",
        siglip_variant="mu/14",
        vocab_size=512,
        action_horizon=5,
        max_token_len=8,
        image_keys=(),
        remat_policy="none",
    ),
    # All prefixes are the same prompt, so there is nothing to see in their tokens.
    critic=MLPCritics(num_critics=4, hidden_dims=(256, 256, 256), q_aggregation="min", use_pi0_features=False),
    backup=ImplicitValue(kappa=0.8, hidden_dims=(256, 256, 256)),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=4,
        sampling_steps=4,
        discount=0.98,
        target_update_tau=0.02,
        # Online, the policy must not clone its own failures, which are long: a third of the steps that it plays.
        policy_data="success",
        # With 0.999, the average would lag behind by a quarter of the offline phase.
        ema_decay=0.995,
    ),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=0.7, success_ratio=0.5),
    data=DataConfig(
        data_dir="./data/quickstart",
        rewards=RewardConfig(kind="minus_one_zero"),
        demonstrations=DemonstrationsConfig(num_episodes=160, quality="detours", max_episode_steps=200),
        validation_share=0.0,  # judged in its environment
        # The prompt is the same everywhere, so it is short.
        prompt_from_task=False,
        default_prompt="cube",
        tokenizer="byte",
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=100, peak_lr=1.5e-2, decay_steps=4_000, decay_lr=5e-4),
    actor_optimizer=AdamW(b2=0.999, weight_decay=0.0),
    critic_lr_schedule=ConstantSchedule(1.25e-3),
    training=TrainingConfig(offline_steps=4_000, online_steps=3_600, eval_frequency=2_400, save_frequency=2_000),
    env=EnvConfig(id="cube-single-play-singletask-v0", num_envs=16, max_episode_steps=100),
    online=OnlineConfig(start_steps=500, update_to_data_ratio=0.125, episodes_per_round=8),
    evaluation=EvaluationConfig(
        num_episodes=50, best_of_n=16, baselines=("bc", "bc_success_only", "offline_continued")
    ),
    checkpoints=CheckpointConfig(keep_period=None),
)
