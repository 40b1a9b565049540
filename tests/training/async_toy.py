"""The toy environment for runs with an actor process; named "async_toy:slow-toy" and "async_toy:actorless-toy"."""

import os
import pathlib
import sys
import time
from typing import Any

from toy_env import MAX_STEPS, Toy, ToyEnv

from acrlpd.envs import Env, register_env

# A run in the directory $TOY_HOLD stands still after so many rounds, until the directory has the file GO_ON.
HELD_AFTER = 14
GO_ON = "go-on"


class SlowToy(Toy):
    """As slow as a simulator. It stands still where a test has to interfere, however slow the test is."""

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        while (run := os.environ.get("TOY_HOLD")) and _is_held(pathlib.Path(run)):
            time.sleep(0.05)
        return super().step(action)


def _is_held(run: pathlib.Path) -> bool:
    return not (run / GO_ON).exists() and len(list((run / "replay").glob("round-*.json"))) >= HELD_AFTER


def make_slow_toy(
    name: str, *, cameras: Any = None, image_size: Any = None, max_episode_steps: int | None = None
) -> Env:
    limit = max_episode_steps or MAX_STEPS
    return ToyEnv(SlowToy("toy"), name=name, prompt="go right", fps=10, cameras=cameras, max_episode_steps=limit)


def make_actorless_toy(name: str, **options: Any) -> Env:
    """Works for evaluation and breaks in the actor, whose processes have its arguments."""
    if pathlib.Path(sys.argv[0]).name == "actor.py":
        raise OSError("its model file is missing")
    return make_slow_toy(name, **options)


register_env("slow-toy", make_slow_toy)
register_env("actorless-toy", make_actorless_toy)
