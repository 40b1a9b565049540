"""LIBERO with pi0.5: the `libero` preset on openpi's best LIBERO policy.

As in openpi's pi05_libero, chunks have 10 steps, actions are absolute, the policy does not read the state (the
critics do), statistics are quantiles, the EMA decays by 0.999, and the learning rate is 5e-5 instead of 3e-4. The
critics judge the first 5 steps of a chunk.
"""

import dataclasses

from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config.presets import libero
from acrlpd.config.run import OpenPICompatibilityConfig, WeightLoaderConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = dataclasses.replace(
    libero.CONFIG,
    name="libero_pi05",
    model=Pi0Config(
        pi05=True,
        action_horizon=10,
        discrete_state_input=False,
        image_keys=("base_0_rgb", "left_wrist_0_rgb"),
    ),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi05_libero/params"),
    data=dataclasses.replace(libero.CONFIG.data, use_delta_joint_actions=False),
    actor_lr_schedule=CosineDecaySchedule(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi05_libero"),
)
