"""A small environment that needs no simulator, with every fault that a simulator can have.

A point on a line starts near 0 and has to reach 1. The name of the environment chooses a fault: "toy-raise-13" raises
an error in the episode with seed 13, every time. "toy-crash-13-once" crashes only the first time. A file under
$TOY_FAULTS remembers the first time, because the process does not survive it. A toy that hangs says so in a file there.
Each process with toys leaves a file under $TOY_STARTS, if the test has set this variable.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from acrlpd.envs import Env, register_env
from acrlpd.envs.env import Columns

GOAL = 1.0
FAULT_STEP = 3
MAX_STEPS = 12


class Toy:
    """An object with gymnasium's interface."""

    def __init__(self, name: str) -> None:
        _, _, rest = name.partition("-")
        self.fault, seed, *once = rest.split("-") if rest else ("", "-1")
        self.fault_seed, self.once = int(seed), once == ["once"]
        self.action_space = SimpleNamespace(low=-np.ones(2, np.float32), high=np.ones(2, np.float32))
        self.renders = 0
        self.closed = False
        if "TOY_STARTS" in os.environ:
            (Path(os.environ["TOY_STARTS"]) / str(os.getpid())).touch()

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self.seed, self.steps = seed, 0
        self.position = np.random.default_rng(seed).uniform(0.0, 0.2)
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        reward = -1.0
        if self.seed == self.fault_seed and self.steps == FAULT_STEP and self._fault_is_due():
            if self.fault == "raise":
                raise ZeroDivisionError("physics exploded")
            if self.fault == "crash":
                os._exit(7)
            if self.fault == "hang":
                (Path(os.environ["TOY_FAULTS"]) / f"hanging-{os.getpid()}").touch()
                while True:
                    time.sleep(60)
            if self.fault == "nan":
                self.position = np.nan
            if self.fault == "shape":
                return np.zeros(5), reward, False, False, {"success": False}
            if self.fault == "reward":
                reward = np.inf
        self.position += 0.2 * float(action[0])
        success = bool(self.position >= GOAL)
        info = {} if self.fault == "silent" else {"success": success}
        return self.observation(), 0.0 if success else reward, success, False, info

    def observation(self) -> np.ndarray:
        return np.array([self.position, self.steps, GOAL])

    def render(self) -> np.ndarray:
        if self.fault == "blind":
            raise RuntimeError("no graphics here")
        self.renders += 1
        image = np.zeros((16, 24, 3), np.uint8)
        image[:, : int(np.clip(24 * self.position, 0, 24))] = 200
        return image

    def close(self) -> None:
        self.closed = True

    def _fault_is_due(self) -> bool:
        if not self.once:
            return True
        try:
            (Path(os.environ["TOY_FAULTS"]) / self.fault).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class ToyEnv(Env):
    def observation_columns(self, raw: np.ndarray) -> Columns:
        columns = {"observation.state": raw}
        camera = "observation.images.side"
        return columns | ({camera: self.env.render()} if self.wants(camera) else {})


def make_toy(
    name: str,
    *,
    cameras: Any = None,
    image_size: tuple[int, int] = (16, 24),
    max_episode_steps: int | None = None,
) -> Env:
    if name == "toy-broken":
        raise OSError("its model file is missing")
    limit = MAX_STEPS if max_episode_steps is None else min(MAX_STEPS, max_episode_steps)
    return ToyEnv(
        Toy(name),
        name=name,
        prompt="go right",
        fps=10,
        cameras=cameras,
        max_episode_steps=limit,
        robot_type="toy",
    )


register_env("toy", make_toy)
register_env("toy-*", make_toy)


def seeded_chunks(observations: Columns, prompts: Any, seed: int) -> Any:
    """A policy that mostly goes right, and reports a value."""
    from acrlpd.envs import Chunks

    rng = np.random.default_rng(seed)
    actions = rng.uniform(-0.2, 1.0, (len(prompts), 4, 2)).astype(np.float32)
    return Chunks(actions, {"q": observations["observation.state"][:, 0]})
