"""An expert of the toy environment, which goes right, or left in half of the episodes of quality "mixed"."""

import os
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from acrlpd.envs import Env
from acrlpd.experts.expert import Expert, register_expert


class ToyExpert(Expert):
    qualities: ClassVar[dict[str, str]] = {"good": "goes right", "mixed": "goes right or left"}

    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None:
        self.rng = rng
        self.direction = 1.0 if quality == "good" or rng.uniform() < 0.5 else -1.0

    def act(self) -> np.ndarray:
        if collection := os.environ.get("TOY_STOPS_AFTER_3_EPISODES"):
            while len(list(Path(collection).glob("episode-*.npz"))) >= 3:
                time.sleep(0.01)
        return np.array([self.direction, self.rng.normal()], np.float32)


for name in ("toy", "toy-*", "odd-toy"):
    register_expert(name, "toy_expert:ToyExpert")
