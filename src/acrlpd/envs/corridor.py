"""An environment that needs no simulator: a corridor whose right end is the goal.

A point starts in the middle. In half of the demonstrations the point goes to the wrong end. Cloning therefore succeeds
in about half of the episodes, critics that learn from rewards tell both halves apart, and a wrong sign of the advantage
makes a policy that nearly always fails. An episode takes microseconds.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from acrlpd.envs.env import Env

_MAX_STEPS = 16
_STEP = 0.15


class Corridor:
    """The simulator, with gymnasium's interface. Positions go from -1 to 1."""

    action_space = SimpleNamespace(low=-np.ones(2, np.float32), high=np.ones(2, np.float32))

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self._position = np.random.default_rng(seed).uniform(-0.1, 0.1, 2)  # along the corridor, and across it
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._position = np.clip(self._position + _STEP * np.asarray(action, np.float64), -1.0, 1.0)
        success = bool(self._position[0] >= 1.0)
        at_wrong_end = bool(self._position[0] <= -1.0)
        return self._observation(), float(success), success or at_wrong_end, False, {"success": success}

    def close(self) -> None:
        """There is nothing to close."""

    def _observation(self) -> np.ndarray:
        return self._position.astype(np.float32)


def make_corridor(
    name: str, *, cameras: Sequence[str] | None, image_size: tuple[int, int], max_episode_steps: int | None
) -> Env:
    limit = _MAX_STEPS if max_episode_steps is None else max_episode_steps
    return Env(Corridor(), name=name, prompt="go right", fps=10, cameras=cameras, max_episode_steps=limit)
