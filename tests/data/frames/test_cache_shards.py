"""How a frame cache divides its episodes into shards, of which all are open at once."""

import json
from pathlib import Path

import pytest

from acrlpd.config import RewardConfig
from acrlpd.data.frames import cache_builder as frame_cache_builder
from acrlpd.data.sources.fake import FakeSource
from acrlpd.data.sources.source import open_source


def test_the_number_of_open_shards_is_bounded(datasets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(datasets / "libero_v30")
    monkeypatch.setattr(frame_cache_builder, "SHARD_BYTES", 1)
    monkeypatch.setattr(frame_cache_builder, "MAX_SHARDS", 6)
    spec = frame_cache_builder.CacheSpec(source.identity, source.cameras, 40, 56, "raw")
    plan = frame_cache_builder._plan(source, spec)
    assert len(plan) <= 6
    for camera in source.cameras:
        assert [i for _, c, indices in plan if c == camera for i in indices] == list(source.indices)
    assert json.loads(json.dumps(plan))


class EqualEpisodes(FakeSource):
    """Episodes of three cameras that all have the same length."""

    def __init__(self, num_episodes: int, length: int) -> None:
        super().__init__(("high", "left", "right"), {}, RewardConfig())
        self.indices = tuple(range(num_episodes))
        self.length = length

    def _length(self, index: int) -> int:
        return self.length


@pytest.mark.parametrize("num_episodes", [250, 400, 3000])
def test_the_number_of_open_shards_is_bounded_where_episodes_are_about_half_a_shard(num_episodes: int) -> None:
    source = EqualEpisodes(num_episodes, length=1000)  # an episode of one camera has 144 MiB
    spec = frame_cache_builder.CacheSpec(source.identity, list(source.cameras), 224, 224, "raw")
    plan = frame_cache_builder._plan(source, spec)
    assert len(plan) <= frame_cache_builder.MAX_SHARDS
    assert [i for _, camera, indices in plan if camera == "left" for i in indices] == list(source.indices)
