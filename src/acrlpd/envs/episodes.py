"""One episode as it was lived, and what a worker does with an environment to make one.

These functions run where the environment lives, often in a process without JAX.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from acrlpd.data.sources.source import Feature
from acrlpd.envs.env import Columns, Env, EnvSpec, Step


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A whole episode of L steps."""

    seed: int
    prompt: str
    actions: np.ndarray  # float32 [L, a] as executed
    rewards: np.ndarray  # float32 [L]
    success: np.ndarray  # bool [L] after each action
    terminated: bool  # ended by itself; otherwise a time limit cut it
    # Column or camera -> [L, ...]: what was seen before each action. Empty where nobody recorded it.
    observations: Columns
    # What the policy said at the start of each chunk: the steps int64 [c], and numbers [c] by name.
    chunk_steps: np.ndarray
    values: dict[str, np.ndarray]
    video: Sequence[np.ndarray] = ()  # uint8 [h, w, 3] each

    @property
    def length(self) -> int:
        return len(self.rewards)

    @property
    def succeeded(self) -> bool:
        return bool(self.success.any())

    def columns(self, action_column: str = "action") -> Columns:
        """All recorded columns as a dataset has them: column -> [L, ...], cameras included."""
        done = np.zeros(self.length, bool)
        done[-1] = True
        return {
            **self.observations,
            action_column: self.actions,
            "next.reward": self.rewards,
            "next.done": done,
            "next.success": self.success,
        }


def rollout_features(spec: EnvSpec) -> dict[str, Feature]:
    """The features of `Rollout.columns`, as a dataset declares them."""
    return {
        **spec.features,
        spec.action_column: Feature("float32", (spec.action_dim,)),
        "next.reward": Feature("float32", ()),
        "next.done": Feature("bool", ()),
        "next.success": Feature("bool", ()),
    }


@dataclasses.dataclass(frozen=True)
class Start:
    """A new episode."""

    observation: Columns
    prompt: str
    video: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Executed:
    """What came of a chunk: k steps, fewer than asked for if the episode ended in between."""

    # After each step, or after the last one only; nothing after the end of an episode, where nobody acts.
    observations: list[Columns]
    actions: np.ndarray  # [k, a]
    rewards: np.ndarray  # [k]
    success: np.ndarray  # [k]
    terminated: bool
    truncated: bool
    video: list[np.ndarray]

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def start_episode(env: Env, seed: int, film: bool) -> Start:
    env.reset(seed)
    return Start(env.observe(), env.prompt, [env.render()] if film else [])


def check_filming(env: Env) -> None:
    """Raises where no pictures can be made, before episodes are lost to it."""
    env.reset(0)
    env.render()


def execute_chunk(env: Env, actions: np.ndarray, record: bool, film: bool) -> Executed:
    """Executes actions [k, a] open loop. Without `record` only the last observation is made (and rendered)."""
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
        truncated=steps[-1].truncated,
        video=video,
    )


def demonstrate(env: Env, seed: int, quality: str) -> Rollout:
    """One episode of the environment's scripted expert, everything recorded."""
    env.reset(seed)
    expert = env.expert(quality, np.random.default_rng(seed))
    seen: list[Columns] = []
    steps: list[Step] = []
    executed: list[np.ndarray] = []
    while not steps or not steps[-1].done:
        seen.append(env.observe())
        executed.append(env.executed(expert.act()))
        steps.append(env.step(executed[-1]))
    return Rollout(
        seed=seed,
        prompt=env.prompt,
        actions=np.stack(executed),
        rewards=np.array([step.reward for step in steps], np.float32),
        success=np.array([step.success for step in steps]),
        terminated=steps[-1].terminated,
        observations=stack(seen),
        chunk_steps=np.zeros(0, np.int64),
        values={},
    )


def stack(observations: Sequence[Columns]) -> Columns:
    """[{column: x}, ...] -> {column: [n, ...]}"""
    return {name: np.stack([observation[name] for observation in observations]) for name in observations[0]}
