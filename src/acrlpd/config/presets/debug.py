"""A few steps of the complete path on a CPU in seconds: tiny pi0 with one camera, random data.

The preset is for trying a change and for tests; the policy learns nothing.
"""

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.config.data import DataConfig, RepackConfig
from acrlpd.config.run import TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = RLTrainConfig(
    name="debug",
    batch_size=8,
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        action_horizon=10,
        max_token_len=16,
        image_resolution=(28, 28),
        image_keys=("base_0_rgb",),
    ),
    critic=MLPCritics(num_critics=2, hidden_dims=(64, 64)),
    acrlpd=ACRLPDHyperparams(num_action_samples=2, sampling_steps=2),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=7),
    data=DataConfig(
        repo_id="fake",
        repack=RepackConfig(base_0_rgb="image"),
        default_prompt="do nothing",
        tokenizer="byte",
    ),
    training=TrainingConfig(offline_steps=20, eval_frequency=0, log_frequency=5, save_frequency=10),
)
