"""One environment as the rest of acrlpd sees it: an adapter around gymnasium that trusts nothing.

Observations come out under the names of dataset columns (`observation.state`, `observation.images.top`),
so that demonstrations, rollouts and replay go through the same transforms. Stepping and observing are
apart: during an open-loop chunk nobody looks at the images, so nobody renders them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from acrlpd.data.sources.source import Feature
from acrlpd.envs.errors import EnvError

Columns = dict[str, np.ndarray]
# (reward, terminated, info) -> whether the task is done; None where the environment does not say.
SuccessFn = Callable[[float, bool, Mapping[str, Any]], bool | None]

STATE = "observation.state"
# What to do where an environment and a dataset have different names for the same thing.
RENAME = "Give it the dataset's names: an Env with observation_columns of its own (docs/online.md)"


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What is the same in every episode of an environment."""

    name: str
    features: dict[str, Feature]  # columns and cameras of one observation
    action_dim: int
    action_column: str
    fps: float
    robot_type: str | None
    qualities: tuple[str, ...]  # that a scripted expert can show; () where there is none

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.dtype == "video")


@dataclasses.dataclass(frozen=True)
class Step:
    """What one action led to."""

    reward: float
    terminated: bool  # a true end: nothing comes after it
    truncated: bool  # a time limit: the episode was cut
    success: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Expert(Protocol):
    """Acts in one episode of the environment it was made for, with access to the simulator's state."""

    def act(self) -> np.ndarray:
        """The action [a] for the present state."""


def success_from_info(reward: float, terminated: bool, info: Mapping[str, Any]) -> bool | None:
    """gymnasium's usual keys."""
    for key in ("success", "is_success"):
        if key in info:
            return bool(info[key])
    return None


class Env:
    """An adapter around something with gymnasium's `reset`, `step`, `render` and `close`.

    Subclasses for simulators override `observation_columns`, and `expert` where there is a scripted one.
    """

    # Names of the qualities that `expert` knows; () where there is no expert.
    qualities: tuple[str, ...] = ()
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
        """`cameras` are the camera columns to observe; None: all. `clip_actions` cuts actions to the
        environment's own bounds, where these mean something."""
        self.env = env
        self.name = name
        self.prompt = prompt
        self._cameras = None if cameras is None else tuple(cameras)
        self._max_episode_steps = max_episode_steps
        self._success = success
        self._low, self._high = _action_bounds(name, env.action_space)
        self._clip_actions = clip_actions
        self._raw: Any = None
        self._seed: int | None = None
        self._steps = 0
        self._features: dict[str, Feature] | None = None
        self.reset(0)
        self._features = {column: _feature(value) for column, value in self.observe().items()}
        self.spec = EnvSpec(name, self._features, len(self._low), self.action_column, fps, robot_type, self.qualities)
        self._missing_cameras()
        self._raw = None  # the first episode must be asked for

    def reset(self, seed: int) -> None:
        """Starts the episode that belongs to the seed."""
        self._seed, self._steps = int(seed), 0
        with _Blame(self):
            self._raw, _ = self.env.reset(seed=self._seed)

    def step(self, action: np.ndarray) -> Step:
        """Executes one action [a] in the environment's units."""
        if self._raw is None:
            raise EnvError(f"environment {self.name!r}: there is no episode under way; call reset first")
        action = self.executed(action)
        with _Blame(self):
            self._raw, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        reward, terminated = float(reward), bool(terminated)
        if not np.isfinite(reward):
            raise EnvError(f"{self._where()}: the reward is {reward}")
        with _Blame(self, "its success function"):
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
        """The action as it is executed, and recorded: cut to the bounds where there are any."""
        action = np.asarray(action, np.float32)
        if action.shape != self._low.shape or not np.isfinite(action).all():
            raise EnvError(
                f"{self._where()}: an action must be {len(self._low)} finite numbers; found shape "
                f"{list(action.shape)}, {np.array2string(action, threshold=20)}"
            )
        return np.clip(action, self._low, self._high) if self._clip_actions else action

    def observe(self) -> Columns:
        """The present observation: column -> float32 [n], camera -> uint8 [h, w, 3]. Renders if it must."""
        if self._raw is None:
            raise EnvError(f"environment {self.name!r}: there is no episode under way; call reset first")
        with _Blame(self):
            columns = self.observation_columns(self._raw)
        result = {}
        for name, value in columns.items():
            value = np.asarray(value)
            if value.dtype == np.uint8 and value.ndim == 3:
                if self._cameras is not None and name not in self._cameras:
                    continue
            else:
                value = np.atleast_1d(value).astype(np.float32)
            result[name] = value
        self._check(result)
        return result

    def observation_columns(self, raw: Any) -> Columns:
        """A raw observation as dataset columns: what gymnasium's spaces suggest, unless overridden."""
        return flatten_observation(raw)

    def wants(self, camera: str) -> bool:
        """Whether a camera column has to be rendered."""
        return self._cameras is None or camera in self._cameras

    def render(self) -> np.ndarray:
        """A picture of the scene for a person: uint8 [h, w, 3]."""
        with _Blame(self):
            frame = self.env.render()
        frame = np.asarray(frame)
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise EnvError(
                f"environment {self.name!r} cannot be filmed: render() gave {frame.dtype} {list(frame.shape)}, "
                "expected uint8 [h, w, 3]"
            )
        return frame

    def expert(self, quality: str, rng: np.random.Generator) -> Expert:
        """A scripted expert for the episode under way."""
        raise EnvError(f"environment {self.name!r} has no scripted expert")

    def close(self) -> None:
        self.env.close()

    def _check(self, columns: Columns) -> None:
        if self._features is not None and columns.keys() != self._features.keys():
            raise EnvError(f"{self._where()}: the observation has {sorted(columns)}, expected {sorted(self._features)}")
        for name, value in columns.items():
            if self._features is not None and value.shape != self._features[name].shape:
                raise EnvError(
                    f"{self._where()}: {name} has shape {list(value.shape)}, expected "
                    f"{list(self._features[name].shape)}"
                )
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise EnvError(f"{self._where()}: {name} is not finite: {np.array2string(value, threshold=20)}")

    def _missing_cameras(self) -> None:
        missing = [camera for camera in self._cameras or () if camera not in self.spec.features]
        if missing:
            self._cameras = self._features = None  # an unwanted camera is not observed; look at all to name them
            offered = ", ".join(name for name, value in self.observe().items() if value.dtype == np.uint8) or "none"
            raise EnvError(f"environment {self.name!r} has no camera {missing[0]!r}; it has {offered}. {RENAME}")

    def _where(self) -> str:
        return f"environment {self.name!r}, seed {self._seed}, step {self._steps}"


class _Blame:
    """Says which environment, seed and step an error of the simulator belongs to."""

    def __init__(self, env: Env, what: str = "it") -> None:
        self._env = env
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EnvError):
            message = f"{self._env._where()}: {self._what} raised {type(error).__name__}: {error}"
            raise EnvError(message) from error


def flatten_observation(raw: Any) -> Columns:
    """gymnasium observations under lerobot's names.

    A vector is `observation.state`, an image `observation.image`; in a dict `agent_pos` and `state` are the
    state, an image is `observation.images.<key>` and anything else `observation.<key>`.
    """
    if not isinstance(raw, Mapping):
        return {"observation.image" if _is_image(raw) else STATE: raw}
    columns: Columns = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            columns |= flatten_observation(value)
        elif _is_image(value):
            columns[f"observation.images.{key}"] = value
        elif key in ("agent_pos", "state"):
            columns[STATE] = value
        else:
            columns[f"observation.{key}"] = value
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
