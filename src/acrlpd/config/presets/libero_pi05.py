"""LIBERO with pi0.5: the `libero` preset on openpi's best LIBERO policy.

As in openpi's pi05_libero, chunks have 10 steps, actions are absolute, the policy does not read the state (the
critics do), statistics are quantiles, and the EMA decays by 0.999. The critics judge the first 5 steps of a chunk.
By the plan, the run takes 9.9 hours and 152 GiB of disk on one H100; playing and evaluations come on top.
"""

import dataclasses

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
    openpi_compatibility=OpenPICompatibilityConfig(config_name="pi05_libero"),
)
