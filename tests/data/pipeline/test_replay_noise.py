"""The noise of played chunks: from the replay's files into batches, at the steps where chunks begin."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_device_rows import DEVICE, assert_same_batches, batches_of, changed
from test_mixing import FEATURES, FIRST, H, Mixed, lived

from acrlpd.data.pipeline.replay import Replay, ReplayError
from acrlpd.data.pipeline.sampling import WindowSampler
from acrlpd.data.sources.source import NOISE_COLUMN, Feature

CONFIG = changed(improvement="dsrl_sac", acrlpd__loss_weights__actor_weight=1.0)
LENGTHS = [7, 12, 3, 20]
WITH_NOISE = {**FEATURES, NOISE_COLUMN: Feature("float32", (5,))}


def noise_of(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number + 1).normal(size=(length, 5)).astype(np.float32)


def test_batches_have_the_noise_of_the_steps_at_which_chunks_begin(tmp_path: pathlib.Path) -> None:
    """On the host and on the devices; the files are read by a second replay."""
    writer = Replay(tmp_path, WITH_NOISE, fps=10)
    for i, length in enumerate(LENGTHS):
        columns = {**lived(FIRST + i, length), NOISE_COLUMN: noise_of(FIRST + i, length)}
        writer.write(FIRST + i, columns, "do nothing")
    replays = [Replay(tmp_path, WITH_NOISE, fps=10) for _ in range(2)]
    with Mixed(replays[0], CONFIG) as host, Mixed(replays[1], CONFIG, device_sharding=DEVICE) as device:
        assert not np.any(host.batches(1)[0].noise)  # of the dataset, from which nothing is learned
        batches_of(device, 1)
        for mixed in (host, device):
            mixed.admit(range(FIRST, FIRST + len(LENGTHS)), 0.0)
        batches = host.batches(4)
        assert_same_batches(batches_of(device, 4), batches)
    starts = set()
    for batch in batches:
        for number, step, noise in zip(batch.episode_id, batch.step_id, batch.noise, strict=True):
            np.testing.assert_array_equal(noise, noise_of(number, LENGTHS[number - FIRST])[step])
            starts.add((int(number) - FIRST, int(step)))
    assert starts == {(i, t) for i, length in enumerate(LENGTHS) for t in range(0, length, H)}


def test_an_episode_without_its_noise_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ReplayError, match=r"policy_noise must have shape \(5,\) per step; found None"):
        Replay(tmp_path, WITH_NOISE, fps=10).write(0, lived(0, 4), "do nothing")


def test_without_critics_of_noise_there_is_none(tmp_path: pathlib.Path) -> None:
    with Mixed(Replay(tmp_path, FEATURES, fps=10), changed()) as mixed:
        assert mixed.batches(1)[0].noise is None


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 0.5]),
)
def test_windows_start_at_multiples_of_the_stride(episodes, horizon, stride, sequence_ratio, success_ratio):
    """Against a list of all starts: each can be drawn, nothing else is drawn, and every kind has its share."""
    lengths = np.array([length for length, _ in episodes])
    good = np.array([min(length, steps) for length, steps in episodes])
    if lengths.max() < horizon:
        sequence_ratio = 0.0
    sampler = WindowSampler(
        lengths,
        seed=1,
        horizon_length=horizon,
        sequence_ratio=sequence_ratio,
        success_ratio=success_ratio,
        steps_to_success=good,
        stride=stride,
    )
    drawn = sampler.sample_many(range(400), 40)
    found = set(zip(drawn.episodes.ravel().tolist(), drawn.steps.ravel().tolist(), strict=True))
    starts = {(e, t) for e, length in enumerate(lengths) for t in range(0, length, stride)}
    assert found <= starts
    if sequence_ratio is None and success_ratio is None:
        assert found == starts
    outside = {(e, t) for e, t in starts if t + horizon > lengths[e]}
    if sequence_ratio == 0.5 and outside:
        counts = (drawn.steps + horizon > lengths[drawn.episodes]).sum(axis=1)
        assert (counts == 20).all()
    if success_ratio and any(t < good[e] for e, t in starts):
        assert any(t < good[e] for e, t in found)
