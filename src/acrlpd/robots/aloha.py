"""ALOHA: two arms of six joints and a gripper, 14 dims of state and actions."""

import dataclasses

import numpy as np

from acrlpd.data.pipeline.transforms import DataDict, make_bool_mask
from acrlpd.robots.naming import to_model_names

ACTION_DIM = 14
# Joints relative, grippers absolute.
DELTA_ACTION_MASK = make_bool_mask(6, -1, 6, -1)
CAMERAS = {
    "base_0_rgb": "cam_high",
    "left_wrist_0_rgb": "cam_left_wrist",
    "right_wrist_0_rgb": "cam_right_wrist",
}
_KNOWN_CAMERAS = {*CAMERAS.values(), "cam_low"}  # openpi's clients may send cam_low; nothing uses it

# The pi base models were trained with other joint directions than ALOHA's.
_JOINT_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
_GRIPPERS = [6, 13]

# Gripper openings: metres at ALOHA's 0 and 1, radians at the pi models' 0 and 1, and the same of the
# leader arm, whose units ALOHA's gripper actions have.
_METRES = (0.01844, 0.058)
_PI_RADIANS = (0.5476, 1.6296)
_LEADER_RADIANS = (-0.6213, 1.4910)
# The gripper's crank: it turns a rotation of the horn into a linear opening.
_ARM_LENGTH = 0.036
_HORN_RADIUS = 0.022


@dataclasses.dataclass(frozen=True)
class AlohaInputs:
    """{"state", "images" {cam_high, ...}, "actions"} to the model's names and, if asked, to pi units."""

    adapt_to_pi: bool = True

    def __call__(self, data: DataDict) -> DataDict:
        images = data.get("images", {})
        unknown = set(images) - _KNOWN_CAMERAS
        if unknown:
            raise ValueError(f"ALOHA's cameras are {sorted(_KNOWN_CAMERAS)}; found also {sorted(unknown)}")
        state = np.asarray(data["state"])
        if state.shape[-1] != ACTION_DIM:
            raise ValueError(f"ALOHA's state has {ACTION_DIM} dims, found {state.shape[-1]}; correct data.repack.state")
        result = to_model_names(data, state, {slot: images.get(camera) for slot, camera in CAMERAS.items()})
        if self.adapt_to_pi:
            result["state"] = _state_to_pi(state)
            if "actions" in result:
                result["actions"] = _actions_to_pi(result["actions"])
        return result


@dataclasses.dataclass(frozen=True)
class AlohaOutputs:
    """The model's actions back to ALOHA's 14 dims and units."""

    adapt_to_pi: bool = True

    def __call__(self, data: DataDict) -> DataDict:
        actions = np.asarray(data["actions"])[..., :ACTION_DIM]
        return {"actions": _actions_from_pi(actions) if self.adapt_to_pi else actions}


def _state_to_pi(state: np.ndarray) -> np.ndarray:
    state = _JOINT_SIGNS * state
    low, high = _METRES
    opening = state[..., _GRIPPERS] * (high - low) + low
    sine = (_HORN_RADIUS**2 + opening**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * opening)
    low, high = _PI_RADIANS
    state[..., _GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - low) / (high - low)
    return state


def _actions_to_pi(actions: np.ndarray) -> np.ndarray:
    """The inverse of `_actions_from_pi`, for training."""
    actions = _JOINT_SIGNS * actions
    low, high = _LEADER_RADIANS
    actions[..., _GRIPPERS] = actions[..., _GRIPPERS] * (high - low) + low - _PI_RADIANS[0]
    return actions


def _actions_from_pi(actions: np.ndarray) -> np.ndarray:
    actions = _JOINT_SIGNS * actions
    low, high = _LEADER_RADIANS
    actions[..., _GRIPPERS] = (actions[..., _GRIPPERS] + _PI_RADIANS[0] - low) / (high - low)
    return actions
