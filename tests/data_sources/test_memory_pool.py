"""The memory pool: which episodes it holds when, and that it holds no more."""

from pathlib import Path

import numpy as np
import pytest

from acrlpd.data.frames.memory_pool import MemoryPool
from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.sources.source import EpisodeSource, open_source


@pytest.fixture(scope="module")
def source(datasets: Path) -> EpisodeSource:
    return open_source(datasets / "libero_v21")


def test_it_holds_the_episodes_of_its_seed(source: EpisodeSource) -> None:
    pool, again = (MemoryPool(source, ("image",), 28, 28, 2) for _ in range(2))
    pool.refresh_memory_pool(5)
    pool.refresh_memory_pool(3)
    again.refresh_memory_pool(3)
    assert pool.episodes.tolist() == again.episodes.tolist()
    assert len(pool.episodes) == 2
    for position in pool.episodes:
        ts = np.array([0, 39, 11])
        out = np.zeros((3, 28, 28, 3), np.uint8)
        pool.read_into("image", np.full(3, position), ts, out)
        expected = resize_with_pad(source.episode(position).frames("image", ts), 28, 28)
        np.testing.assert_array_equal(out, expected)


def test_counting_seeds_reach_every_episode_once_per_round(source: EpisodeSource) -> None:
    pool = MemoryPool(source, (), 28, 28, 2)
    seen = []
    for seed in range(6):
        pool.refresh_memory_pool(seed)
        seen += pool.episodes.tolist()
    assert sorted(seen[:6]) == sorted(seen[6:]) == [0, 1, 2, 3, 4, 5]
    assert seen[:6] != seen[6:]


def test_a_round_that_ends_within_a_filling_is_complete_all_the_same(source: EpisodeSource) -> None:
    """4 of 6 episodes: the first round ends in the middle of the second filling, the second begins there."""
    pool = MemoryPool(source, (), 28, 28, 4)
    fillings = []
    for seed in range(30):
        pool.refresh_memory_pool(seed)
        fillings.append(set(pool.episodes.tolist()))
    for first, second, third in zip(fillings[::3], fillings[1::3], fillings[2::3], strict=True):
        assert first | second == second | third == set(range(6))


def test_it_is_never_larger_than_the_dataset(source: EpisodeSource) -> None:
    pool = MemoryPool(source, (), 28, 28, 100)
    pool.refresh_memory_pool(7)
    assert pool.episodes.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_episode_that_is_not_in_it(source: EpisodeSource) -> None:
    pool = MemoryPool(source, ("image",), 28, 28, 1)
    pool.refresh_memory_pool(0)
    absent = next(i for i in range(6) if i not in pool.episodes)
    with pytest.raises(KeyError, match=r"not in the memory pool"):
        pool.read_into("image", np.array([absent]), np.array([0]), np.zeros((1, 28, 28, 3), np.uint8))
    with pytest.raises(ValueError, match=r"at least 1"):
        MemoryPool(source, ("image",), 28, 28, 0)
