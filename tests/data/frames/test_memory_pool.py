"""The memory pool: which episodes it holds when, and that it holds no more."""

from pathlib import Path

import numpy as np
import pytest

from acrlpd.data.frames.decoded import MemoryPool
from acrlpd.data.frames.store import resize_with_pad
from acrlpd.data.sources.source import EpisodeSource, open_source


@pytest.fixture(scope="module")
def source(datasets: Path) -> EpisodeSource:
    return open_source(datasets / "libero_v21")


def test_it_holds_the_episodes_of_its_epoch(source: EpisodeSource) -> None:
    pool, again = (MemoryPool(source, ("image",), 28, 28, 2) for _ in range(2))
    pool.prepare(5)
    episodes = pool.prepare(3)
    assert episodes.tolist() == again.prepare(3).tolist()
    assert len(episodes) == pool.capacity == 2
    for position in episodes:
        ts = np.array([0, 39, 11])
        out = np.zeros((3, 28, 28, 3), np.uint8)
        pool.read_into("image", np.full(3, position), ts, out)
        expected = resize_with_pad(source.episode(position).frames("image", ts), 28, 28)
        np.testing.assert_array_equal(out, expected)


def test_consecutive_epochs_reach_every_episode_once_per_round(source: EpisodeSource) -> None:
    pool = MemoryPool(source, (), 28, 28, 2)
    seen = []
    for epoch in range(6):
        seen += pool.prepare(epoch).tolist()
    assert sorted(seen[:6]) == sorted(seen[6:]) == [0, 1, 2, 3, 4, 5]
    assert seen[:6] != seen[6:]


def test_a_round_that_ends_within_a_filling_is_complete_all_the_same(source: EpisodeSource) -> None:
    """4 of 6 episodes: the first round ends in the middle of the second filling, the second begins there."""
    pool = MemoryPool(source, (), 28, 28, 4)
    fillings = [set(pool.prepare(epoch).tolist()) for epoch in range(30)]
    for first, second, third in zip(fillings[::3], fillings[1::3], fillings[2::3], strict=True):
        assert first | second == second | third == set(range(6))


def test_it_is_never_larger_than_the_dataset(source: EpisodeSource) -> None:
    pool = MemoryPool(source, (), 28, 28, 100)
    assert pool.prepare(7).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_episode_that_is_not_in_it(source: EpisodeSource) -> None:
    pool = MemoryPool(source, ("image",), 28, 28, 1)
    present = pool.prepare(0)
    absent = next(i for i in range(6) if i not in present)
    with pytest.raises(KeyError, match=r"not in the memory pool"):
        pool.read_into("image", np.array([absent]), np.array([0]), np.zeros((1, 28, 28, 3), np.uint8))
