"""Scripted OGBench experts: the benchmark's own oracles, aimed at the task's goal or past it."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from acrlpd.envs.errors import EnvError
from acrlpd.experts.ogbench_goals import Goal, next_goal, random_goal


@dataclasses.dataclass(frozen=True)
class Quality:
    """How good a demonstration is."""

    # "plan" follows a smooth trajectory; "markov" reacts to the state and so recovers from noise.
    oracle: Literal["plan", "markov"]
    # Standard deviation of the noise on all five actions, drawn per episode. OGBench's own scaling
    # ([1, 1, 1, 3, 10]) ruins the gripper at such levels.
    noise: tuple[float, float] = (0.0, 0.0)
    # Probability to do what the task asks for; otherwise something else that looks the same.
    goal_probability: float = 1.0
    # Whether that is decided once for the whole episode, or again for every goal in it.
    decided: Literal["per_episode", "per_goal"] = "per_episode"


QUALITIES = {
    "expert": Quality("plan"),
    "noisy": Quality("markov", noise=(0.1, 0.5)),
    "mixed": Quality("markov", noise=(0.1, 0.5), goal_probability=0.35),
    "play": Quality("plan", goal_probability=0.3, decided="per_goal"),
}
_PLAN_OPTIONS = {"noise": 0.1, "noise_smoothing": 0.5}
_MARKOV_OPTIONS = {"min_norm": 0.1}


class OGBenchExpert:
    """Plays one goal after another until the episode ends."""

    def __init__(self, simulator: Any, name: str, quality: str, rng: np.random.Generator) -> None:
        if quality not in QUALITIES:
            raise EnvError(f"the expert of {name!r} has qualities {list(QUALITIES)}; found {quality!r}")
        self._simulator = simulator
        self._quality = QUALITIES[quality]
        self._rng = rng
        self._noise = rng.uniform(*self._quality.noise)
        self._on_task = rng.uniform() < self._quality.goal_probability
        self._goal: Goal
        self._oracle: Any = None

    def act(self) -> np.ndarray:
        """The oracle's action [5] with noise; a new goal when the last one is done."""
        if self._oracle is None or self._oracle.done:
            self._start_goal()
        action = self._oracle.select_action(None, self._info())
        action = action + self._rng.normal(0.0, self._noise, 5)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _start_goal(self) -> None:
        if self._quality.decided == "per_goal":
            self._on_task = self._rng.uniform() < self._quality.goal_probability
        self._goal = (next_goal if self._on_task else random_goal)(self._simulator, self._rng)
        self._oracle = self._make_oracle(self._goal.oracle)
        with seeded_globally(int(self._rng.integers(2**32))):
            self._oracle.reset(None, self._info())

    def _make_oracle(self, what: str) -> Any:
        kind = self._quality.oracle
        module = importlib.import_module(f"ogbench.manipspace.oracles.{kind}.{what.lower()}_{kind}")
        options: dict[str, Any] = dict(_PLAN_OPTIONS if kind == "plan" else _MARKOV_OPTIONS)
        if what == "Button":
            options["gripper_always_closed"] = self._simulator.kind == "puzzle"
        return getattr(module, f"{what}{kind.capitalize()}Oracle")(env=self._simulator, **options)

    def _info(self) -> dict[str, Any]:
        return self._simulator.compute_ob_info() | self._goal.info(self._simulator)


@contextlib.contextmanager
def seeded_globally(seed: int) -> Iterator[None]:
    """Seeds numpy's global generator, which the oracles draw from, and leaves it as it was."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
