"""Traces of episodes: which, with which numbers, and their film strips."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rollout_factory import make_rollout

from acrlpd.config import RewardConfig
from acrlpd.envs import Rollout
from acrlpd.evaluation.traces import MAX_TRACES, add_film, choose_episodes, trace_episodes, write_film_strip

REWARDS = RewardConfig(source="success_column", kind="minus_one_zero")


def filmed(rollout: Rollout) -> Rollout:
    """Frame i is a picture of brightness i."""
    frames = [np.full((24, 32, 3), i, np.uint8) for i in range(rollout.length + 1)]
    return dataclasses.replace(rollout, video=frames)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_successes_and_failures_are_both_shown(episodes: list[tuple[bool, bool]]) -> None:
    played = [make_rollout([0.0], success, q=[0.0], seed=i) for i, (success, _) in enumerate(episodes)]
    played = [filmed(r) if film else r for r, (_, film) in zip(played, episodes, strict=True)]
    chosen = choose_episodes(played)
    assert len(chosen) == min(MAX_TRACES, len(played))
    assert [r.seed for r in chosen] == sorted({r.seed for r in chosen})
    assert {r.succeeded for r in chosen} == {r.succeeded for r in played}
    for success in (True, False):  # of a kind, filmed ones come first
        shown = [bool(r.video) for r in chosen if r.succeeded == success]
        there = [bool(r.video) for r in played if r.succeeded == success]
        assert sum(shown) == min(sum(there), len(shown))


def test_a_trace_has_what_was_said_and_what_came() -> None:
    success = make_rollout([0.0] * 5, True, q=[1.0, 2.0, 3.0], chunk=2, seed=7, prompt="lift")
    failure = make_rollout([0.0] * 4, False, q=[1.0, 2.0], chunk=2, seed=8)
    first, second = trace_episodes([success, failure], REWARDS, 0.5)
    assert (first.seed, first.task, first.success, first.chunk_steps) == (7, "lift", True, (0, 2, 4))
    assert first.rewards == (-1.0, -1.0, -1.0, -1.0, 0.0)  # as training computes them
    assert first.returns == pytest.approx((-1.875, -1.5, 0.0))
    assert first.values["q"] == (1.0, 2.0, 3.0) and first.values["q_mean"] == (0.0, 1.0, 2.0)
    assert second.returns is None  # a time limit: nobody knows the rest
    assert (first.video, first.film_strip) == (None, None)
    json.dumps([dataclasses.asdict(first), dataclasses.asdict(second)])
    assert trace_episodes([make_rollout([0.0], True)], REWARDS, 0.5) == ()  # no values, nothing to show


def test_film_strips_are_in_order_from_the_first_to_the_last_picture(tmp_path: Path) -> None:
    rollout = filmed(make_rollout([0.0] * 200, True, q=[0.0] * 200, seed=3))
    (trace,) = trace_episodes([rollout], REWARDS, 0.9)
    trace = add_film(trace, tmp_path, rollout.video, "videos/3.mp4")
    assert (trace.film_strip, trace.video) == ("film_strips/3.jpg", "videos/3.mp4")
    assert (trace.film_steps[0], trace.film_steps[-1], len(trace.film_steps)) == (0, 200, 12)
    pixels = np.asarray(Image.open(tmp_path / "film_strips/3.jpg"))
    assert pixels.shape == (96, 12 * 128, 3)
    shown = [pixels[:, 128 * i + 32 : 128 * i + 96].mean() for i in range(12)]
    assert shown == pytest.approx(trace.film_steps, abs=3)


def test_a_short_film_has_every_picture_once(tmp_path: Path) -> None:
    frames = [np.zeros((10, 10, 3), np.uint8)] * 3
    assert write_film_strip(tmp_path / "strip.jpg", frames).tolist() == [0, 1, 2]
    assert Image.open(tmp_path / "strip.jpg").size == (3 * 96, 96)
