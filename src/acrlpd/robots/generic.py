"""Any other robot: state and actions as they are, cameras named by the model's slots."""

import dataclasses
from collections.abc import Iterator

from acrlpd.robots.base import Robot


@dataclasses.dataclass(frozen=True)
class Generic(Robot):
    """{"state", "images" {base_0_rgb, ...}, "actions", "prompt"}, of any dims."""

    def openpi_differences(self, *, action_dim: int) -> Iterator[str]:
        yield (
            "YourDataConfig is yours to write: openpi has none for this robot. The state goes in as it is, images "
            f"under the model's names, and the first {action_dim} action dims come out."
        )
