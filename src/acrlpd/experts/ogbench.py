"""The scripted expert of OGBench: the benchmark's own oracles, which pursue the task's goal or another goal."""

import dataclasses
import importlib
from typing import Any, ClassVar, Literal

import numpy as np

from acrlpd.envs.env import Env
from acrlpd.experts.expert import Expert
from acrlpd.experts.ogbench_goals import Goal, next_goal, random_goal


@dataclasses.dataclass(frozen=True)
class Quality:
    """How good a demonstration is."""

    shows: str  # for people
    # "plan" follows a smooth trajectory; "markov" reacts to the state and so recovers from noise.
    oracle: Literal["plan", "markov"]
    # Bounds between which the standard deviation of the noise on all five actions is drawn per episode. OGBench's own
    # scaling of the noise ([1, 1, 1, 3, 10]) would keep the gripper from holding anything at such levels.
    noise: tuple[float, float] = (0.0, 0.0)
    # Probability to pursue the goal of the task; otherwise the expert pursues a random goal.
    goal_probability: float = 1.0
    # Whether the expert chooses between these two once for the whole episode, or again whenever a goal is reached.
    decided: Literal["per_episode", "per_goal"] = "per_episode"
    # Random goals that the expert pursues before all others.
    detours: int = 0


QUALITIES = {
    "expert": Quality("smooth, and does the task", "plan"),
    "noisy": Quality("does the task with strong noise on every action", "markov", noise=(0.1, 0.5)),
    "mixed": Quality(
        "noisy, and does the task in 35 % of the episodes, something else in the others",
        "markov",
        noise=(0.1, 0.5),
        goal_probability=0.35,
    ),
    "detours": Quality(
        "smooth, does something else first, and then the task in three of four episodes",
        "plan",
        goal_probability=0.75,
        detours=1,
    ),
    "play": Quality(
        "smooth, with the task as every third goal or so", "plan", goal_probability=0.3, decided="per_goal"
    ),
}
_ORACLE_OPTIONS = {"plan": {"noise": 0.1, "noise_smoothing": 0.5}, "markov": {"min_norm": 0.1}}


class OGBenchExpert(Expert):
    """Pursues one goal after another until the episode ends."""

    qualities: ClassVar[dict[str, str]] = {name: quality.shows for name, quality in QUALITIES.items()}

    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None:
        self._simulator = env.env
        self._quality = QUALITIES[quality]
        self._rng = rng
        self._noise = rng.uniform(*self._quality.noise)
        self._on_task = rng.uniform() < self._quality.goal_probability
        self._detours_left = self._quality.detours
        self._goal: Goal
        self._oracle: Any = None

    def act(self) -> np.ndarray:
        """The action [5] of the oracle, with noise; the expert chooses a new goal when the last one is reached."""
        if self._oracle is None or self._oracle.done:
            self._start_goal()
        action = self._oracle.select_action(None, self._info())
        action = action + self._rng.normal(0.0, self._noise, 5)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _start_goal(self) -> None:
        if self._quality.decided == "per_goal":
            self._on_task = self._rng.uniform() < self._quality.goal_probability
        is_on_task = self._on_task and not self._detours_left
        self._detours_left = max(0, self._detours_left - 1)
        self._goal = (next_goal if is_on_task else random_goal)(self._simulator, self._rng)
        self._oracle = make_oracle(self._simulator, self._quality.oracle, self._goal.oracle)
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(int(self._rng.integers(2**32)))  # noqa: NPY002 (the oracles draw from numpy's global generator)
        try:
            self._oracle.reset(None, self._info())
        finally:
            np.random.set_state(state)  # noqa: NPY002

    def _info(self) -> dict[str, Any]:
        return self._simulator.compute_ob_info() | self._goal.info(self._simulator)


def make_oracle(simulator: Any, kind: Literal["plan", "markov"], what: str) -> Any:
    """OGBench's oracle for what it handles: "cube", "button", "drawer" or "window"."""
    module = importlib.import_module(f"ogbench.manipspace.oracles.{kind}.{what}_{kind}")
    options: dict[str, Any] = dict(_ORACLE_OPTIONS[kind])
    if what == "button":
        options["gripper_always_closed"] = simulator.kind == "puzzle"
    return getattr(module, f"{what.capitalize()}{kind.capitalize()}Oracle")(env=simulator, **options)
