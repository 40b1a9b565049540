"""A robot that is no part of acrlpd: degrees and millimetres, in one file."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from acrlpd.robots.base import Robot, ServingLevel, ServingLimits, make_bool_mask


@dataclasses.dataclass(frozen=True)
class OwnArm(Robot):
    """Six joints in degrees and a gripper in millimetres; the policy learns radians and shares of the opening."""

    opening_mm: float = 80.0

    action_dim = 7
    state_dims: ClassVar[Mapping[str, int | None]] = {"joints": 6, "gripper": 1}
    cameras: ClassVar[Mapping[str, str]] = {"base_0_rgb": "front"}
    delta_action_mask = make_bool_mask(6, -1)
    standard_level = ServingLevel(num_steps=5, best_of_n=2, num_critics=2)
    serving_limits = ServingLimits(max_concurrent_requests=3, request_timeout_s=7.5)

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        return state * self._scale

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        return actions * self._scale

    def actions_from_model(self, actions: np.ndarray) -> np.ndarray:
        return actions / self._scale

    @property
    def _scale(self) -> np.ndarray:
        return np.array([np.pi / 180] * 6 + [1 / self.opening_mm])
