"""Transfer a cube in simulation (gym-aloha): a small pi0 from scratch, three cameras, offline then online.

This is the quick start with images, for one GPU: scripted demonstrations of mixed quality (collected at the first
start), offline RL, online RL, and the policies that both are compared with. In half of the demonstrations the arm
reaches beside the cube. The policy clones what leads to a success; critics that see the same images learn from all
demonstrations, and choose among its chunks when it acts. The targets are those of an implicit value, which need no
candidates. The policy has pi0's architecture at a fraction of its size and reads prompts as bytes, so there is nothing
to download. Rendering needs EGL.

benchmarks/aloha_sim-2026-11-15.md is about an earlier preset: its policy cloned everything, and targets came from
candidates. What the preset reaches as it is now has not been measured yet.
"""

from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.data import DataConfig, DemonstrationsConfig, RepackConfig, RewardConfig
from acrlpd.config.run import CheckpointConfig, EnvConfig, EvaluationConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

CONFIG = RLTrainConfig(
    name="aloha_sim",
    batch_size=128,
    model=Pi0Config(
        paligemma_variant="small",
        action_expert_variant="small",
        siglip_variant="Ti/14",
        vocab_size=512,
        action_dim=14,
        action_horizon=50,
        max_token_len=8,
        image_resolution=(84, 84),
        remat_policy="none",
    ),
    # All results of this preset so far were measured with the mean of the tokens.
    critic=MLPCritics(num_critics=4, hidden_dims=(512, 512, 512), q_aggregation="mean", pooling="mean"),
    backup=ImplicitValue(),
    acrlpd=ACRLPDHyperparams(
        loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
        num_action_samples=4,
        sampling_steps=4,
        discount=0.995,
        target_update_tau=0.01,
        policy_data="success",
        # The image encoder starts from random weights: the critics must teach it to see what they need.
        critic_gradient_to_policy=True,
        ema_decay=0.998,
    ),
    # A chunk is a second of acting, and four or five chunks are an episode. The first chunk decides where the arm goes.
    # Only windows from before the grasp teach the policy to look for the cube, because later the pose of the arm tells
    # where the cube is; so windows at the end of an episode get no extra share.
    qchunking=QChunkingConfig(horizon_length=50, action_dim=14, sequence_ratio=0.95, success_ratio=0.5),
    data=DataConfig(
        data_dir="./data/aloha_sim",
        robot=Aloha(),
        repack=RepackConfig(
            base_0_rgb="observation.images.top",
            left_wrist_0_rgb="observation.images.left_wrist",
            right_wrist_0_rgb="observation.images.right_wrist",
        ),
        # The environment's own reward pays more for staying at the last stage than for finishing.
        rewards=RewardConfig(source="success_column"),
        demonstrations=DemonstrationsConfig(num_episodes=300, max_episode_steps=250),
        validation_share=0.0,  # judged in its environment
        # The cube's place explains 6 % of the first chunk's mean square as joint positions, 24 % as relative positions.
        use_delta_joint_actions=True,
        # The prompt is the same everywhere, so it is short.
        prompt_from_task=False,
        default_prompt="cube",
        tokenizer="byte",
        # All episodes, decoded: 5 GB.
        episodes_per_memory_pool=300,
        num_workers=8,
        prefetch_batches=8,
        # The camera stands still and a centimetre decides: rotations and crops would only blur where the cube is.
        augment_images=False,
    ),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=300, peak_lr=5e-4, decay_steps=6_000, decay_lr=1e-4),
    actor_optimizer=AdamW(b2=0.999, weight_decay=0.0),
    critic_lr_schedule=ConstantSchedule(5e-4),
    # The policy begins to see the cube between updates 1,500 and 3,000.
    training=TrainingConfig(offline_steps=6_000, online_steps=2_250, eval_frequency=1_500, save_frequency=2_000),
    env=EnvConfig(id="gym_aloha/AlohaTransferCube-v0", num_envs=16, max_episode_steps=250, image_size=(84, 84)),
    online=OnlineConfig(start_steps=4_000, update_to_data_ratio=0.04, episodes_per_round=16),
    evaluation=EvaluationConfig(
        num_episodes=50, best_of_n=16, baselines=("bc", "bc_success_only", "offline_continued"), num_videos=2
    ),
    checkpoints=CheckpointConfig(keep_period=None),
)
