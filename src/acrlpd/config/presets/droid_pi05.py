"""DROID with pi0.5: the `droid` preset on the pi0.5 network and weights.

As in openpi's pi05_droid, chunks have 15 steps, the prompt holds the state, and statistics are quantiles. The critics
judge the first 10 steps of a chunk. By the plan, the run takes 9.5 hours and 200 GiB of disk on one H100.
"""

import dataclasses

from acrlpd.config.presets import droid
from acrlpd.config.run import OpenPICompatibilityConfig, WeightLoaderConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = dataclasses.replace(
    droid.CONFIG,
    name="droid_pi05",
    model=Pi0Config(pi05=True, action_horizon=15, image_keys=("base_0_rgb", "left_wrist_0_rgb")),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi05_droid/params"),
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi05_droid"),
)
