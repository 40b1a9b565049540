"""Numbers about a set of episodes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from acrlpd.envs.episodes import Rollout

_Z_95 = 1.959963984540054  # two-sided 95 % of a normal distribution


@dataclasses.dataclass(frozen=True)
class Summary:
    """How well a policy did. Episodes that were lost to crashes are counted apart, never as failures."""

    episodes: int
    successes: int
    success_rate: float
    interval: tuple[float, float]  # 95 %, Wilson
    mean_return: float  # of the environment's own rewards, undiscounted
    std_return: float
    mean_length: float
    mean_success_length: float | None  # None without a success
    lost_episodes: int = 0


def summarize(rollouts: Sequence[Rollout], *, lost_episodes: int = 0) -> Summary:
    if not rollouts:
        raise ValueError(f"there is no episode to summarize ({lost_episodes} were lost)")
    success = np.array([rollout.succeeded for rollout in rollouts])
    returns = np.array([rollout.rewards.sum(dtype=np.float64) for rollout in rollouts])
    lengths = np.array([rollout.length for rollout in rollouts])
    return Summary(
        episodes=len(rollouts),
        successes=int(success.sum()),
        success_rate=float(success.mean()),
        interval=wilson_interval(int(success.sum()), len(rollouts)),
        mean_return=float(returns.mean()),
        std_return=float(returns.std()),
        mean_length=float(lengths.mean()),
        mean_success_length=float(lengths[success].mean()) if success.any() else None,
        lost_episodes=lost_episodes,
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson interval for a probability: it stays inside [0, 1], also for 0 and for all successes."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"expected 0 <= successes <= trials and at least one trial; found {successes} of {trials}")
    rate, z2 = successes / trials, _Z_95**2
    center = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    # Rounding must not put the observed rate outside of the interval.
    return min(max(0.0, center - half), rate), max(min(1.0, center + half), rate)
