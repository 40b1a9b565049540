"""ALOHA with pi0.5: the `aloha` preset on the pi0.5 network and weights.

pi0.5 reads the state from the prompt (200 tokens) and the flow time in its norms; statistics are quantiles. By the
plan, the run takes 6.7 hours and 60 GiB of disk on one H100.
"""

import dataclasses

from acrlpd.config.presets import aloha
from acrlpd.config.run import WeightLoaderConfig
from acrlpd.models.families.pi0 import Pi0Config

CONFIG = dataclasses.replace(
    aloha.CONFIG,
    name="aloha_pi05",
    model=Pi0Config(pi05=True, action_horizon=20),
    weight_loader=WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi05_base/params"),
    openpi_compatibility=dataclasses.replace(aloha.CONFIG.openpi_compatibility, config_name="pi05_aloha"),
)
