"""A few episodes in detail: the critics' values at every chunk, the rewards that followed, and pictures.

The report draws them one below the other, which shows where the critics expect success or failure.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from acrlpd.config import RewardConfig
from acrlpd.envs.episodes import Rollout
from acrlpd.evaluation.statistics import discounted_returns, training_rewards

# Episodes with a trace in one evaluation, so that a record stays small however many episodes were played.
MAX_TRACES = 4
_STRIP_FRAMES = 12
_STRIP_HEIGHT = 96
_JPEG_QUALITY = 80


@dataclasses.dataclass(frozen=True)
class EpisodeTrace:
    """One episode of L steps and c chunks."""

    seed: int
    task: str
    success: bool
    chunk_steps: tuple[int, ...]  # [c] the steps at which the policy was asked
    values: dict[str, tuple[float, ...]]  # name -> [c] numbers of the policy about its choice
    rewards: tuple[float, ...]  # [L] as training computes them
    # [c] the discounted rewards that followed; None where a time limit cut them.
    returns: tuple[float, ...] | None
    # Paths relative to the evaluation's directory.
    video: str | None = None
    film_strip: str | None = None
    film_steps: tuple[int, ...] = ()  # of the pictures in the strip, from left to right


def choose_episodes(played: Sequence[Rollout]) -> list[Rollout]:
    """A few episodes in order of their seeds, successes and failures alike; filmed episodes are preferred."""
    filmed_first = sorted(played, key=lambda rollout: (not rollout.video, rollout.seed))
    kinds = [[r for r in filmed_first if r.succeeded], [r for r in filmed_first if not r.succeeded]]
    by_turns = [kind[i] for i in range(MAX_TRACES) for kind in kinds if i < len(kind)]
    return sorted(by_turns[:MAX_TRACES], key=lambda rollout: rollout.seed)


def trace_episodes(played: Sequence[Rollout], rewards: RewardConfig, discount: float) -> tuple[EpisodeTrace, ...]:
    """Traces of a few episodes, without pictures; nothing for a policy that gave no values."""
    chosen = [rollout for rollout in choose_episodes(played) if "q" in rollout.values]
    if not chosen:
        return ()
    traces = []
    for rollout, step_rewards in zip(chosen, training_rewards(chosen, rewards), strict=True):
        returns = discounted_returns(step_rewards, discount)[rollout.chunk_steps]
        traces.append(
            EpisodeTrace(
                seed=rollout.seed,
                task=rollout.prompt,
                success=rollout.succeeded,
                chunk_steps=tuple(rollout.chunk_steps.tolist()),
                values={name: tuple(values.tolist()) for name, values in rollout.values.items()},
                rewards=tuple(step_rewards.tolist()),
                returns=tuple(returns.tolist()) if rollout.terminated else None,
            )
        )
    return tuple(traces)


def add_film(trace: EpisodeTrace, directory: Path, frames: Sequence[np.ndarray], video: str) -> EpisodeTrace:
    """The trace of an episode with its `video`, a path in `directory`, and with a film strip, which is written."""
    strip = f"film_strips/{trace.seed}.jpg"
    steps = write_film_strip(directory / strip, frames)
    return dataclasses.replace(trace, video=video, film_strip=strip, film_steps=tuple(steps.tolist()))


def write_film_strip(path: Path, frames: Sequence[np.ndarray]) -> np.ndarray:
    """Writes a row of small pictures at even distances, from the first frame to the last; returns their steps."""
    steps = np.unique(np.linspace(0, len(frames) - 1, min(_STRIP_FRAMES, len(frames))).round().astype(np.int64))
    height, width = frames[0].shape[:2]
    size = (max(1, round(_STRIP_HEIGHT * width / height)), _STRIP_HEIGHT)
    strip = Image.new("RGB", (size[0] * len(steps), size[1]))
    for i, step in enumerate(steps):
        strip.paste(Image.fromarray(frames[step]).resize(size, Image.Resampling.BILINEAR), (i * size[0], 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    strip.save(path, quality=_JPEG_QUALITY)
    return steps
