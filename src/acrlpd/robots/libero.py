"""LIBERO: end-effector control, 8 dims of state, 7 of actions, one scene and one wrist camera."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from acrlpd.robots.base import Robot, ServingLevel, ServingLimits, make_bool_mask


@dataclasses.dataclass(frozen=True)
class Libero(Robot):
    """openpi's keys of LIBERO: `observation/image`, `observation/wrist_image`, `observation/state`."""

    action_dim = 7
    state_dims: ClassVar[Mapping[str, int | None]] = {"observation/state": 8}
    cameras: ClassVar[Mapping[str, str]] = {
        "base_0_rgb": "observation/image",
        "left_wrist_0_rgb": "observation/wrist_image",
    }
    dataset_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "base_0_rgb": ("image",),
        "left_wrist_0_rgb": ("wrist_image", "image2"),
        "observation/state": ("state",),
        "actions": ("actions", "action"),
    }
    image_group = None
    # openpi's pi0_libero subtracts the state from the relative actions of LIBERO; its pi05_libero does not.
    delta_action_mask = make_bool_mask(6, -1)
    standard_level = ServingLevel(num_steps=10, best_of_n=16, num_critics=8)
    serving_limits = ServingLimits(max_concurrent_requests=8, request_timeout_s=15.0)
    openpi_data_config = "LeRobotLiberoDataConfig"
    openpi_delta_argument = "extra_delta_transform"
