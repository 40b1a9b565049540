"""An environment and an expert of one's own: a hand over a table, two balls, and a camera above them.

The hand is to touch the red ball within 15 steps; touching the blue ball ends the episode. The state is the place of
the hand alone, so a policy must look at the image to know where the balls are and which ball is red. Change this file
step by step into your own robot: docs/environments.md and docs/demonstrations.md describe the two interfaces.
"""

from typing import ClassVar

import gymnasium
import numpy as np

from acrlpd.envs import Env, register_env
from acrlpd.experts import Expert, register_expert

REACH = 0.2  # how far an action of 1 moves the hand; the table is 2 wide
RADIUS = 0.25  # of a ball
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "hand": (0, 255, 0)}


class Table(gymnasium.Env):
    """Gymnasium's interface, as of any simulator."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, image_size):
        self.image_size = image_size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # everything random must come from self.np_random
        self.hand = np.array([self.np_random.uniform(-0.2, 0.2), -0.8])
        while True:
            (red, blue), y = self.np_random.uniform(-0.8, 0.8, 2), self.np_random.uniform(0.3, 0.7, 2)
            if abs(red - blue) > 0.7:
                self.red, self.blue = np.array([red, y[0]]), np.array([blue, y[1]])
                return self.observation(), {}

    def step(self, action):
        self.hand = np.clip(self.hand + REACH * action, -1, 1)
        success, failure = (bool(np.linalg.norm(self.hand - ball) < RADIUS) for ball in (self.red, self.blue))
        return self.observation(), float(success), success or failure, False, {"success": success}

    def observation(self):  # the dataset gets the columns observation.state and observation.images.top
        return {"state": self.hand, "top": self.render()}

    def render(self):
        """The table from above, uint8 [h, w, 3]."""
        height, width = self.image_size
        ys, xs = np.linspace(1, -1, height)[:, None], np.linspace(-1, 1, width)[None, :]
        image = np.zeros((height, width, 3), np.uint8)
        for name, radius in (("red", RADIUS), ("blue", RADIUS), ("hand", RADIUS / 2)):
            x, y = getattr(self, name)
            image[(xs - x) ** 2 + (ys - y) ** 2 < radius**2] = COLOURS[name]
        return image


class TableExpert(Expert):
    """Moves straight to a ball. An expert may look at the state of the simulator, which a policy does not see."""

    qualities: ClassVar = {
        "expert": "touches the red ball",
        "mixed": "goes to the blue ball in a quarter of the episodes",
    }

    def __init__(self, env, quality, rng):
        self.table, self.rng = env.env, rng
        self.to_red = quality == "expert" or rng.uniform() < 0.75

    def act(self):
        target = self.table.red if self.to_red else self.table.blue
        return (target - self.table.hand) / REACH + self.rng.normal(0, 0.2, 2)


def make_reach(name, *, cameras, image_size, max_episode_steps):
    """What acrlpd calls, in other processes too, when a config or a command names the environment my_env:reach."""
    return Env(
        Table(image_size),
        name=name,
        prompt="touch the red ball",
        fps=10,
        cameras=cameras,
        max_episode_steps=max_episode_steps or 15,
    )


register_env("reach", make_reach)
register_expert("reach", TableExpert)
