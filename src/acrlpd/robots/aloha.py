"""ALOHA: two arms of six joints and a gripper, 14 dims of state and actions."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from acrlpd.robots.base import Robot, ServingLevel, ServingLimits, make_bool_mask

# The pi base models were trained with other joint directions than ALOHA's.
_JOINT_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
_GRIPPERS = [6, 13]

# Gripper openings: metres at ALOHA's 0 and 1, radians at the pi models' 0 and 1, and radians of the leader arm at
# 0 and 1. ALOHA's gripper actions have the units of the leader arm.
_METRES = (0.01844, 0.058)
_PI_RADIANS = (0.5476, 1.6296)
_LEADER_RADIANS = (-0.6213, 1.4910)
# The gripper's crank turns a rotation of the horn into a linear opening.
_ARM_LENGTH = 0.036
_HORN_RADIUS = 0.022


@dataclasses.dataclass(frozen=True)
class Aloha(Robot):
    """{"state", "images" {cam_high, cam_left_wrist, cam_right_wrist}, "actions"}."""

    # Convert joint signs and gripper units to those that the released weights were trained with.
    adapt_to_pi: bool = False

    action_dim = 14
    state_dims: ClassVar[Mapping[str, int | None]] = {"state": 14}
    cameras: ClassVar[Mapping[str, str]] = {
        "base_0_rgb": "cam_high",
        "left_wrist_0_rgb": "cam_left_wrist",
        "right_wrist_0_rgb": "cam_right_wrist",
    }
    dataset_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "base_0_rgb": ("cam_high", "top"),
        "left_wrist_0_rgb": ("cam_left_wrist", "left_wrist"),
        "right_wrist_0_rgb": ("cam_right_wrist", "right_wrist"),
        "state": ("state", "qpos"),
        "actions": ("action", "actions"),
    }
    ignored_cameras = ("cam_low",)  # openpi's clients may send it
    # Joints relative, grippers absolute.
    delta_action_mask = make_bool_mask(6, -1, 6, -1)
    standard_level = ServingLevel(num_steps=15, best_of_n=12, num_critics=4)
    serving_limits = ServingLimits(max_concurrent_requests=2, request_timeout_s=45.0)
    openpi_data_config = "LeRobotAlohaDataConfig"
    openpi_delta_argument = "use_delta_joint_actions"

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return state
        state = _JOINT_SIGNS * state
        low, high = _METRES
        opening = state[..., _GRIPPERS] * (high - low) + low
        sine = (_HORN_RADIUS**2 + opening**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * opening)
        low, high = _PI_RADIANS
        state[..., _GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - low) / (high - low)
        return state

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return actions
        actions = _JOINT_SIGNS * actions
        low, high = _LEADER_RADIANS
        actions[..., _GRIPPERS] = actions[..., _GRIPPERS] * (high - low) + low - _PI_RADIANS[0]
        return actions

    def actions_from_model(self, actions: np.ndarray) -> np.ndarray:
        if not self.adapt_to_pi:
            return actions
        actions = _JOINT_SIGNS * actions
        low, high = _LEADER_RADIANS
        actions[..., _GRIPPERS] = (actions[..., _GRIPPERS] + _PI_RADIANS[0] - low) / (high - low)
        return actions

    def openpi_arguments(self, *, use_delta_joint_actions: bool) -> dict[str, Any]:
        arguments = super().openpi_arguments(use_delta_joint_actions=use_delta_joint_actions)
        return arguments | {"adapt_to_pi": self.adapt_to_pi}
