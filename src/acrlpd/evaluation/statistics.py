"""Numbers about a set of episodes: success with its interval, and how far the values of the critics can be trusted.

`mean_over_seeds` is about several runs: what a training reaches on average, whatever its seed. `compare_values`,
`probability_above` and `rank_correlation` are also about values of recorded episodes.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from acrlpd.config import RewardConfig
from acrlpd.data.pipeline.rewards import compute_rewards
from acrlpd.data.sources.source import ColumnTable
from acrlpd.envs.episodes import Rollout

# The range of a success rate, for `mean_over_seeds`.
RATES = (0.0, 1.0)

_BINS = 5
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
    min_return: float
    max_return: float
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
        min_return=float(returns.min()),
        max_return=float(returns.max()),
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


@dataclasses.dataclass(frozen=True)
class MeanOverSeeds:
    """What runs reach that differ in nothing but their seed."""

    mean: float
    interval: tuple[float, float] | None  # 95 %; None for one seed, because one value does not show a spread


def mean_over_seeds(values: Sequence[float], limits: tuple[float, float] = (-math.inf, math.inf)) -> MeanOverSeeds:
    """The mean of one value per seed with its 95 % interval by Student's t, which ends at `limits`.

    A seed counts as one observation, however many episodes its value comes from. The interval therefore contains both
    the chance of the training and the chance of the episodes.
    """
    if not values:
        raise ValueError("there is no seed to take a mean over; expected at least one value")
    mean = statistics.mean(values)
    if len(values) == 1:
        return MeanOverSeeds(mean, None)
    from scipy.special import stdtrit  # takes a quarter of a second, which a training of one seed does not pay

    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return MeanOverSeeds(mean, (max(limits[0], mean - half), min(limits[1], mean + half)))


@dataclasses.dataclass(frozen=True)
class CalibrationBin:
    """Chunks with similar predicted values."""

    chunks: int
    predicted: float
    realised: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Predicted value of the chosen chunk against the discounted return that followed it.

    Only chunks of episodes that ended by themselves count, because a time limit cuts the return. `success_auc` uses
    all episodes.
    """

    chunks: int
    bias: float  # mean of predicted - realised
    rmse: float
    correlation: float | None  # None where the predicted or the realised values do not vary
    # Spearman's correlation, that of the ranks: 1 where a higher value always means a higher return, whatever the
    # scale of the values. Choosing among candidates needs no more than the right order. None as for `correlation`.
    rank_correlation: float | None
    bins: tuple[CalibrationBin, ...]  # by predicted value, with equally many chunks each
    # Probability that the value at the start of a successful episode exceeds the value at the start of a failed
    # episode; one half is chance. None unless there are successes and failures.
    success_auc: float | None


@dataclasses.dataclass(frozen=True)
class BestOfNEffect:
    """What choosing among candidates gains, by the values of the critics themselves."""

    value_gain: float  # mean of (the chosen candidate's value - the mean of all candidates' values)
    value_spread: float  # mean standard deviation of the candidates' values
    action_spread: float  # mean standard deviation of the candidates' normalised actions


def best_of_n_effect(rollouts: Sequence[Rollout]) -> BestOfNEffect | None:
    """The effect in these episodes; None if the policy gave no values."""
    if not _have_values(rollouts):
        return None

    def mean(name: str) -> float:
        return float(np.concatenate([rollout.values[name] for rollout in rollouts]).mean())

    return BestOfNEffect(mean("q") - mean("q_mean"), mean("q_std"), mean("action_std"))


def calibrate(rollouts: Sequence[Rollout], rewards: RewardConfig, discount: float) -> Calibration | None:
    """The calibration in these episodes; None if no episode ended by itself, or the policy gave no values."""
    known = [rollout for rollout in rollouts if rollout.terminated]
    if not known or not _have_values(rollouts):
        return None
    predicted = np.concatenate([rollout.values["q"] for rollout in known]).astype(np.float64)
    steps = training_rewards(known, rewards)
    realised = np.concatenate(
        [discounted_returns(r, discount)[rollout.chunk_steps] for r, rollout in zip(steps, known, strict=True)]
    )
    return compare_values(predicted, realised, _success_auc(rollouts))


def compare_values(predicted: np.ndarray, realised: np.ndarray, success_auc: float | None) -> Calibration:
    """The calibration of predicted values [n] of chunks against the returns [n] that followed them."""
    error = predicted - realised
    parts = np.array_split(np.argsort(predicted, kind="stable"), min(_BINS, len(predicted)))
    varies = np.ptp(predicted) > 0 and np.ptp(realised) > 0
    return Calibration(
        chunks=len(error),
        bias=float(error.mean()),
        rmse=float(np.sqrt(np.mean(error**2))),
        correlation=float(np.corrcoef(predicted, realised)[0, 1]) if varies else None,
        rank_correlation=rank_correlation(predicted, realised),
        bins=tuple(
            CalibrationBin(len(part), float(predicted[part].mean()), float(realised[part].mean())) for part in parts
        ),
        success_auc=success_auc,
    )


def _have_values(rollouts: Sequence[Rollout]) -> bool:
    return all("q" in rollout.values for rollout in rollouts)


def training_rewards(rollouts: Sequence[Rollout], config: RewardConfig) -> list[np.ndarray]:
    """Rewards [L] of each episode as training computes them from a dataset of these episodes."""
    lengths, columns = [rollout.length for rollout in rollouts], [rollout.columns() for rollout in rollouts]
    names = {
        "next.reward": config.reward_column,
        "next.success": config.success_column,
        "next.done": config.done_column,
        "next.truncated": config.truncated_column,
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    table = ColumnTable(
        columns={name: np.concatenate([episode[key] for episode in columns]) for key, name in names.items()},
        offsets=offsets,
        prompts=(None,),
        prompt_index=np.zeros(offsets[-1], np.int32),
    )
    rewards = compute_rewards(table, tuple(range(len(rollouts))), config, None).rewards
    return np.split(rewards, offsets[1:-1])


def discounted_returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """sum_i discount^i * rewards[t + i] for every t."""
    returns = np.zeros(len(rewards))
    total = 0.0
    for t in reversed(range(len(rewards))):
        total = float(rewards[t]) + discount * total
        returns[t] = total
    return returns


def _success_auc(rollouts: Sequence[Rollout]) -> float | None:
    first = np.array([rollout.values["q"][0] for rollout in rollouts])
    success = np.array([rollout.succeeded for rollout in rollouts])
    return probability_above(first[success], first[~success])


def probability_above(values: np.ndarray, others: np.ndarray) -> float | None:
    """The probability that one of `values` is above one of `others`; ties count half. None if either is empty."""
    if not len(values) or not len(others):
        return None
    difference = values[:, None] - others[None]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's correlation: 1 if both rank alike. None if there are fewer than two different values."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
