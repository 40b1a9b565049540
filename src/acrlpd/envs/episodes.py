"""One episode, the functions that play a part of one in an environment, and its film.

A pool runs these functions in the process of the environment, which has no JAX.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from acrlpd.data.sources.source import NOISE_COLUMN, Feature
from acrlpd.envs.env import Columns, Env, EnvSpec


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A whole episode of L steps."""

    seed: int
    prompt: str
    actions: np.ndarray  # float32 [L, a] as executed
    rewards: np.ndarray  # float32 [L]
    success: np.ndarray  # bool [L] after each action
    terminated: bool  # True: the episode ended by itself; False: a time limit cut the episode
    # Column or camera -> [L, ...]: the observation before each action. Empty where observations were not recorded.
    observations: Columns
    # What the policy said at the start of each of the c chunks: at which step int64 [c], and numbers [c] by name.
    chunk_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # float32 [L, z]: the noise that the chunk of each step was made of. None where the policy does not tell it.
    noise: np.ndarray | None = None
    video: Sequence[np.ndarray] = ()  # uint8 [h, w, 3] each

    @property
    def length(self) -> int:
        return len(self.rewards)

    @property
    def succeeded(self) -> bool:
        return bool(self.success.any())

    def columns(self, action_column: str = "action") -> Columns:
        """All recorded columns as a dataset has them: column -> [L, ...], cameras included."""
        is_last = np.arange(1, self.length + 1) == self.length
        return {
            **self.observations,
            action_column: self.actions,
            "next.reward": self.rewards,
            "next.done": is_last,
            "next.truncated": is_last & (not self.terminated),
            "next.success": self.success,
            **({} if self.noise is None else {NOISE_COLUMN: self.noise}),
        }


def rollout_features(spec: EnvSpec, noise_dim: int | None = None) -> dict[str, Feature]:
    """The features of `Rollout.columns`, as a dataset declares them; `noise_dim` is the size of recorded noise."""
    return {
        **spec.features,
        spec.action_column: Feature("float32", (spec.action_dim,)),
        "next.reward": Feature("float32", ()),
        "next.done": Feature("bool", ()),
        "next.truncated": Feature("bool", ()),
        "next.success": Feature("bool", ()),
        **({} if noise_dim is None else {NOISE_COLUMN: Feature("float32", (noise_dim,))}),
    }


@dataclasses.dataclass(frozen=True)
class Executed:
    """The k steps of a chunk that were executed; fewer than the chunk has where the episode ended before."""

    # After each step, or only after the last step. There is no observation after the end of the episode.
    observations: list[Columns]
    actions: np.ndarray  # [k, a]
    rewards: np.ndarray  # [k]
    success: np.ndarray  # [k]
    terminated: bool
    done: bool  # terminated or truncated
    video: list[np.ndarray]


def start_episode(env: Env, seed: int, film: bool) -> tuple[str, list[Columns], list[np.ndarray]]:
    """The prompt of a new episode, its first observation, and its first frame if the episode is filmed."""
    env.reset(seed)
    return env.prompt, [env.observe()], [env.render()] if film else []


def check_filming(env: Env) -> None:
    """Raises an error where the environment cannot render, before the first episode is played."""
    env.reset(0)
    env.render()


def execute_chunk(env: Env, actions: np.ndarray, record: bool, film: bool) -> Executed:
    """Executes actions [k, a] open loop. Without `record` only the last observation is made and rendered."""
    observations, steps, executed, video = [], [], [], []
    for i, action in enumerate(actions):
        executed.append(env.executed(action))
        steps.append(env.step(executed[-1]))
        if film:
            video.append(env.render())
        if steps[-1].done:
            break
        if record or i == len(actions) - 1:
            observations.append(env.observe())
    return Executed(
        observations=observations,
        actions=np.stack(executed),
        rewards=np.array([step.reward for step in steps], np.float32),
        success=np.array([step.success for step in steps]),
        terminated=steps[-1].terminated,
        done=steps[-1].done,
        video=video,
    )


def stack(observations: Sequence[Columns]) -> Columns:
    """[{column: x}, ...] -> {column: [n, ...]}"""
    return {name: np.stack([observation[name] for observation in observations]) for name in observations[0]}


def write_video(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Writes frames uint8 [h, w, 3] as H.264 in MP4, which plays everywhere, cut to the even sizes that H.264 needs."""
    height, width = (size // 2 * 2 for size in frames[0].shape[:2])
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
