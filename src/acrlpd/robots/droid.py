"""DROID: seven joints and a gripper, 8 dims of state and actions, one exterior and one wrist camera."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from acrlpd.robots.base import Robot, ServingLevel, ServingLimits, make_bool_mask


@dataclasses.dataclass(frozen=True)
class Droid(Robot):
    """openpi's keys of DROID: `observation/joint_position`, `observation/gripper_position` and two images."""

    action_dim = 8
    state_dims: ClassVar[Mapping[str, int | None]] = {
        "observation/joint_position": 7,
        "observation/gripper_position": 1,
    }
    cameras: ClassVar[Mapping[str, str]] = {
        "base_0_rgb": "observation/exterior_image_1_left",
        "left_wrist_0_rgb": "observation/wrist_image_left",
    }
    dataset_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "base_0_rgb": ("exterior_image_1_left", "exterior_1_left"),
        "left_wrist_0_rgb": ("wrist_image_left", "wrist_left"),
        "observation/joint_position": ("joint_position",),
        "observation/gripper_position": ("gripper_position",),
        "actions": ("actions", "action"),
    }
    image_group = None
    # For joint positions as actions. Joint velocities, which are DROID's usual actions, are relative already.
    delta_action_mask = make_bool_mask(7, -1)
    standard_level = ServingLevel(num_steps=20, best_of_n=8, num_critics=5)
    serving_limits = ServingLimits(max_concurrent_requests=4, request_timeout_s=30.0)
    openpi_data_config = "LeRobotDROIDDataConfig"

    client_warning = (
        "openpi's DROID client executes the first 7 action dims as joint velocities "
        "(`RobotEnv(action_space='joint_velocity')`). A policy that has learned joint positions needs a client "
        "with `action_space='joint_position'`: positions that are executed as velocities can do harm."
    )
