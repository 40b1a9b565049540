"""Any other robot: state and actions as they are, cameras named by the model's slots."""

import dataclasses

from acrlpd.robots.base import Robot


@dataclasses.dataclass(frozen=True)
class Generic(Robot):
    """{"state", "images" {base_0_rgb, ...}, "actions", "prompt"}, of any dims."""
