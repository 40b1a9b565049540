"""pi0-FAST, which writes action chunks as tokens: DROID, LIBERO, and a tiny one that runs on a CPU in seconds.

Everything that is not said here is that of the preset `droid`, `libero` or `debug`. The sizes are openpi's: DROID has
chunks of 10 steps and 8 dims, LIBERO of 10 steps and 7 dims, both have 180 tokens, of which 80 are for actions. As
in openpi, nothing is padded, statistics are quantiles, the average of the policy decays by 0.99, and a black image
stands where the robot lacks a camera. DROID learns at 5e-5 after 1,000 steps of warm-up, LIBERO with openpi's cosine
from 2.5e-5. openpi's own fine-tuning of DROID takes 100,000 updates of 256 windows and two days on 8 H100; this preset
starts from the weights that came out of such a run, and makes 30,000 updates of 32 windows.

Writing a chunk takes one pass of the language model for each token, several times as long as the 10 steps of pi0. So
there are 4 candidates, drawn at temperature 0.7, and targets come from a value network (implicit_value), for which
nothing is written. Acting chooses the best of the 4.

The presets use the released tokenizer of actions. `acrlpd data fast_tokenizer` fits one on your dataset, which makes
chunks shorter; docs/pi0_fast.md has the steps.
"""

import dataclasses

from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.presets import debug, droid, libero
from acrlpd.config.run import OpenPICompatibilityConfig, WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.pi0_fast import Pi0FASTConfig

_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
_BASE = "gs://openpi-assets/checkpoints"


def _fast(
    name: str, base: RLTrainConfig, model: Pi0FASTConfig, weights: str, schedule: CosineDecaySchedule
) -> RLTrainConfig:
    return dataclasses.replace(
        base,
        name=name,
        model=model,
        weight_loader=WeightLoaderConfig("checkpoint", f"{_BASE}/{weights}/params"),
        acrlpd=dataclasses.replace(base.acrlpd, num_action_samples=4, ema_decay=0.99),
        backup=ImplicitValue(),
        actor_lr_schedule=schedule,
        openpi_compatibility=OpenPICompatibilityConfig(config_name=name),
    )


_DROID = _fast(
    "pi0_fast_droid",
    droid.CONFIG,
    Pi0FASTConfig(
        state_dim=8,
        action_dim=8,
        action_horizon=10,
        max_token_len=180,
        max_action_tokens=80,
        temperature=0.7,
        image_keys=_CAMERAS,
        black_image_at=1,
    ),
    "pi0_fast_droid",
    CosineDecaySchedule(warmup_steps=1_000, peak_lr=5e-5, decay_steps=30_000, decay_lr=5e-5),
)

_LIBERO = _fast(
    "pi0_fast_libero",
    libero.CONFIG,
    Pi0FASTConfig(
        state_dim=8,
        action_dim=7,
        action_horizon=10,
        max_token_len=180,
        max_action_tokens=80,
        temperature=0.7,
        image_keys=_CAMERAS,
        black_image_at=2,
    ),
    "pi0_fast_base",
    CosineDecaySchedule(warmup_steps=1_000, peak_lr=2.5e-5, decay_steps=30_000, decay_lr=2.5e-6),
)

_DEBUG = dataclasses.replace(
    debug.CONFIG,
    name="debug_fast",
    model=Pi0FASTConfig(
        dtype="float32",
        paligemma_variant="tiny",
        siglip_variant="mu/14",
        vocab_size=768,
        state_dim=4,
        action_dim=3,
        action_horizon=5,
        max_token_len=96,
        max_action_tokens=32,
        fast_tokenizer="byte",
        temperature=0.7,
        train_at_decode_positions=True,
        image_resolution=(28, 28),
        image_keys=("base_0_rgb",),
    ),
    critic=MLPCritics(num_critics=2, hidden_dims=(64, 64)),
    acrlpd=ACRLPDHyperparams(num_action_samples=2),
    qchunking=QChunkingConfig(horizon_length=5, action_dim=3),
)

CONFIGS = {
    "pi0-FAST on DROID: action tokens, one arm; takes 10.5 hours and 175 GiB of disk on one H100": _DROID,
    "pi0-FAST on LIBERO: action tokens; takes 10.5 hours and 133 GiB of disk on one H100": _LIBERO,
    "a tiny pi0-FAST on random data, for a CPU": _DEBUG,
}
