"""ALOHA with pi0.5: the `aloha` preset on the pi0.5 network and weights.

pi0.5 reads the state from the prompt (200 tokens) and the flow time in its norms; statistics are quantiles.
"""

import dataclasses

from acrlpd.config.presets import aloha
from acrlpd.config.run import OpenPICompatibilityConfig, WeightLoaderConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = dataclasses.replace(
    aloha.CONFIG,
    name="aloha_pi05",
    model=Pi0Config(pi05=True, action_horizon=20),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi05_base/params"),
    openpi_compatibility=OpenPICompatibilityConfig(
        config_name="pi05_aloha", reset_pose=(0.0, -1.5, 1.5, 0.0, 0.0, 0.0)
    ),
)
