"""The quick start: RL against imitation on a laptop CPU, OGBench cube-single from state.

A tiny pi0 (prompt and state tokens, no camera) learns from 80 scripted demonstrations, most of which move the cube to
the wrong place. The policy has 100 steps to move the cube to the right place, and the reward is -1 until it succeeds.
Chunks have 5 steps. The policy clones all demonstrations, good and bad; critics learn which chunks lead to success,
and choose the best of 16 when the policy acts. Offline RL is followed by online RL, and both are compared with
cloning and with more offline RL. Two cores are enough; there is no GPU and no download.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
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
    # All prefixes are the same prompt, so there is nothing to look for in their tokens.
    critic=MLPCritics(num_critics=2, hidden_dims=(256, 256, 256), q_aggregation="mean", pooling="mean"),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=4,
        sampling_steps=4,
        discount=0.98,
        target_update_tau=0.01,
        # With 0.999, a third of the average would still be initial weights when the offline phase ends.
        ema_decay=0.99,
    ),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=0.7),
    data=DataConfig(
        data_dir="./data/quickstart",
        rewards=RewardConfig(kind="minus_one_zero"),
        demonstrations=DemonstrationsConfig(num_episodes=80, max_episode_steps=100),
        validation_share=0.0,  # judged in its environment
        # The prompt is the same everywhere, so it is short.
        prompt_from_task=False,
        default_prompt="cube",
        tokenizer="byte",
    ),
    actor_lr_schedule=ConstantSchedule(2e-3),
    actor_optimizer=AdamW(b2=0.999, weight_decay=0.0),
    critic_lr_schedule=ConstantSchedule(1e-3),
    training=TrainingConfig(offline_steps=1_200, online_steps=1_200, eval_frequency=600, save_frequency=600),
    env=EnvConfig(id="cube-single-play-singletask-v0", num_envs=16, max_episode_steps=100),
    online=OnlineConfig(start_steps=500, update_to_data_ratio=0.125, episodes_per_round=8),
    evaluation=EvaluationConfig(
        num_episodes=50, best_of_n=16, baselines=("bc", "bc_success_only", "offline_continued")
    ),
    checkpoints=CheckpointConfig(keep_period=None),
)
