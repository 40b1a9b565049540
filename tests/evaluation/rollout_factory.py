"""Episodes by hand."""

from collections.abc import Sequence

import numpy as np

from acrlpd.envs import Rollout


def make_rollout(
    rewards: Sequence[float],
    success: bool,
    q: Sequence[float] = (),
    chunk: int = 1,
    seed: int = 0,
    prompt: str = "task",
) -> Rollout:
    """A success ends at its last step; a failure is cut there."""
    length = len(rewards)
    flags = np.zeros(length, bool)
    flags[-1] = success
    values = {"q": np.array(q), "q_mean": np.array(q) - 1.0, "q_std": np.ones(len(q)), "action_std": np.ones(len(q))}
    return Rollout(
        seed=seed,
        prompt=prompt,
        actions=np.zeros((length, 2), np.float32),
        rewards=np.array(rewards, np.float32),
        success=flags,
        terminated=success,
        observations={},
        chunk_steps=np.arange(0, length, chunk),
        values=values if len(q) else {},
    )
