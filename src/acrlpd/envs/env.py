"""One environment as the rest of acrlpd sees it: an adapter around gymnasium's interface.

The adapter checks everything that a simulator returns. Observations have the names of dataset columns
(`observation.state`, `observation.images.top`), so that demonstrations, rollouts and the replay go through the same
transforms. `step` returns no observation: nobody looks at the images within an open-loop chunk, so none is rendered.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from acrlpd.data.sources.source import Feature
from acrlpd.execution.base import Columns

# (reward, terminated, info) -> whether the task is done; None where the environment does not say.
SuccessFn = Callable[[float, bool, Mapping[str, Any]], bool | None]

STATE = "observation.state"
# The end of an error message about names that differ between an environment and a dataset.
RENAME = "Give it the dataset's names: an Env with observation_columns of its own (docs/environments.md)"


class EnvError(ValueError):
    """An environment cannot be made, or returned something wrong; the message says what and where."""


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What is the same in every episode of an environment."""

    name: str
    features: dict[str, Feature]  # columns and cameras of one observation
    action_dim: int
    action_column: str
    fps: float
    robot_type: str | None

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one action led to."""

    reward: float
    terminated: bool  # the episode ended by itself
    truncated: bool  # a time limit cut the episode
    success: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def success_from_info(reward: float, terminated: bool, info: Mapping[str, Any]) -> bool | None:
    """Success under the keys that gymnasium environments usually have."""
    return info.get("success", info.get("is_success"))


class Env:
    """An adapter around an object with gymnasium's `reset`, `step`, `render` and `close`.

    Subclasses for simulators override `observation_columns`.
    """

    # The dataset column that holds the actions.
    action_column = "action"

    def __init__(
        self,
        env: Any,
        *,
        name: str,
        prompt: str,
        fps: float,
        cameras: Sequence[str] | None = None,
        max_episode_steps: int | None = None,
        clip_actions: bool = True,
        success: SuccessFn = success_from_info,
        robot_type: str | None = None,
    ) -> None:
        """`cameras` are the camera columns to observe; None means all of them. `clip_actions` cuts actions to the
        bounds of the environment's action space; turn it off where these bounds are not the real ones."""
        self.env = env
        self.name = name
        self.prompt = prompt
        self._cameras = None if cameras is None else tuple(cameras)
        self._max_episode_steps = max_episode_steps
        self._success = success
        self._low, self._high = _action_bounds(name, env.action_space)
        self._clip_actions = clip_actions
        self._raw: Any = None  # the last observation of the simulator; None before the first reset
        self._seed: int | None = None
        self._steps = 0
        self._features: dict[str, Feature] | None = None
        self.reset(0)
        self._features = {column: _feature(value) for column, value in self.observe().items()}
        self.spec = EnvSpec(name, self._features, len(self._low), self.action_column, fps, robot_type)
        self._check_cameras()
        self._raw = None  # the user starts the first episode

    def rename(self, name: str) -> None:
        """Gives the environment the name by which a user asked for it; errors and the spec use this name."""
        self.name, self.spec = name, dataclasses.replace(self.spec, name=name)

    def reset(self, seed: int) -> None:
        """Starts the episode that belongs to the seed."""
        self._seed, self._steps = int(seed), 0
        with self._errors_name_the_step():
            self._raw, _ = self.env.reset(seed=self._seed)

    def step(self, action: np.ndarray) -> Step:
        """Executes one action [a] in the environment's units."""
        self._check_started()
        action = self.executed(action)
        with self._errors_name_the_step():
            self._raw, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        reward, terminated = self._check_reward(reward), bool(terminated)
        with self._errors_name_the_step("its success function"):
            success = self._success(reward, terminated, info)
        if success is None:
            raise EnvError(
                f"environment {self.name!r} does not say whether the task is done: info has neither 'success' "
                "nor 'is_success'. Register it with a success function: register_env(name, make) whose make "
                "passes success=lambda reward, terminated, info: ... to Env"
            )
        limit = self._max_episode_steps
        truncated = not terminated and (bool(truncated) or (limit is not None and self._steps >= limit))
        return Step(reward, terminated, truncated, bool(success))

    def executed(self, action: np.ndarray) -> np.ndarray:
        """The action as the environment executes it and as a dataset records it: cut to the bounds."""
        action = np.asarray(action, np.float32)
        if action.shape != self._low.shape or not np.isfinite(action).all():
            raise EnvError(
                f"{self._where()}: an action must be {len(self._low)} finite numbers; found shape "
                f"{list(action.shape)}, {np.array2string(action, threshold=20)}"
            )
        return np.clip(action, self._low, self._high) if self._clip_actions else action

    def observe(self) -> Columns:
        """The present observation: column -> float32 [n], camera -> uint8 [h, w, 3]. Cameras are rendered now."""
        self._check_started()
        with self._errors_name_the_step():
            columns = self.observation_columns(self._raw)
        result = {}
        for name, value in columns.items():
            value = np.asarray(value)
            if not _is_image(value):
                result[name] = np.atleast_1d(value).astype(np.float32)
            elif self.wants(name):
                result[name] = value.copy()  # A simulator may draw the next image into the same array.
        self._check_observation(result)
        return result

    def observation_columns(self, raw: Any) -> Columns:
        """An observation of the simulator as dataset columns; subclasses choose their own names."""
        return flatten_observation(raw)

    def wants(self, camera: str) -> bool:
        """Whether a camera column has to be rendered."""
        return self._cameras is None or camera in self._cameras

    def render(self) -> np.ndarray:
        """A picture of the scene for a person: uint8 [h, w, 3]."""
        with self._errors_name_the_step():
            frame = np.array(self.env.render())  # a copy, as in `observe`
        if not _is_image(frame):
            raise EnvError(
                f"environment {self.name!r} cannot be filmed: render() gave {frame.dtype} {list(frame.shape)}, "
                "expected uint8 [h, w, 3]"
            )
        return frame

    def close(self) -> None:
        self.env.close()

    def _check_started(self) -> None:
        if self._raw is None:
            raise EnvError(f"environment {self.name!r}: no episode has started; call reset first")

    def _check_reward(self, reward: Any) -> float:
        try:
            # Python makes a number of a text such as "1.0", but a text as reward is an error of the environment.
            number = float("nan" if isinstance(reward, str | bytes) else reward)
        except (TypeError, ValueError):
            number = float("nan")
        if not np.isfinite(number):
            raise EnvError(f"{self._where()}: the reward is {reward!r:.100}, expected a finite number")
        return number

    def _check_observation(self, columns: Columns) -> None:
        expected = self._features or {name: _feature(value) for name, value in columns.items()}
        if columns.keys() != expected.keys():
            raise EnvError(f"{self._where()}: the observation has {sorted(columns)}, expected {sorted(expected)}")
        for name, value in columns.items():
            shape = expected[name].shape
            if value.shape != shape:
                raise EnvError(f"{self._where()}: {name} has shape {list(value.shape)}, expected {list(shape)}")
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise EnvError(f"{self._where()}: {name} is not finite: {np.array2string(value, threshold=20)}")

    def _check_cameras(self) -> None:
        missing = [camera for camera in self._cameras or () if camera not in self.spec.features]
        if missing:
            self._cameras = self._features = None  # observe every camera once, so that the message can name them
            offered = ", ".join(name for name, value in self.observe().items() if _is_image(value)) or "none"
            raise EnvError(f"environment {self.name!r} has no camera {missing[0]!r}; it has {offered}. {RENAME}")

    @contextlib.contextmanager
    def _errors_name_the_step(self, culprit: str = "it") -> Iterator[None]:
        """Turns an error of the simulator into one that names the environment, the seed and the step."""
        try:
            yield
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"{self._where()}: {culprit} raised {type(error).__name__}: {error}") from error

    def _where(self) -> str:
        return f"environment {self.name!r}, seed {self._seed}, step {self._steps}"


def flatten_observation(raw: Any) -> Columns:
    """A gymnasium observation under lerobot's names.

    A vector is `observation.state`, an image `observation.image`. In a dict `agent_pos` and `state` are the
    state, an image is `observation.images.<key>` and everything else `observation.<key>`.
    """
    if not isinstance(raw, Mapping):
        return {"observation.image" if _is_image(raw) else STATE: raw}
    columns: Columns = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            named = flatten_observation(value)
        elif _is_image(value):
            named = {f"observation.images.{key}": value}
        else:
            named = {STATE if key in ("agent_pos", "state") else f"observation.{key}": value}
        if twice := columns.keys() & named.keys():
            raise EnvError(f"two parts of the observation would be called {min(twice)}, one of them {key!r}. {RENAME}")
        columns |= named
    return columns


def _is_image(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype == np.uint8 and array.ndim == 3


def _feature(value: np.ndarray) -> Feature:
    return Feature("video" if value.dtype == np.uint8 else "float32", value.shape)


def _action_bounds(name: str, space: Any) -> tuple[np.ndarray, np.ndarray]:
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None or np.ndim(low) != 1:
        raise EnvError(
            f"environment {name!r}: actions must be a vector of numbers (a one-dimensional Box); found {space}"
        )
    return np.asarray(low, np.float32), np.asarray(high, np.float32)
