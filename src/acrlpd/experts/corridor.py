"""The scripted expert of the corridor: half of its demonstrations go to the wrong end."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from acrlpd.envs.env import Env
from acrlpd.experts.expert import Expert

_NOISE = 0.3


class CorridorExpert(Expert):
    """Goes to one end, with noise on every action."""

    qualities: ClassVar[Mapping[str, str]] = {"mixed": "goes to the goal, or in half of the episodes to the wrong end"}

    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None:
        self._rng = rng
        self._direction = 1.0 if rng.uniform() < 0.5 else -1.0

    def act(self) -> np.ndarray:
        return np.array([0.7 * self._direction, 0.0]) + _NOISE * self._rng.standard_normal(2)
