"""The same batches whatever delivers them: threads, pools, caches, processes, devices, and a resumed run."""

import dataclasses
import gc
import logging
import shutil
import threading

import jax
import numpy as np
import pytest
from data_pipeline_helpers import SIZE, assert_equal, batches, with_data

from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import DataLoader, create_data_loader
from acrlpd.data.sources.source import DatasetError, EpisodeSource


@pytest.mark.parametrize("num_workers", [1, 4])
def test_batches_do_not_depend_on_workers(config, num_workers):
    expected = batches(config, 6)
    assert_equal(batches(with_data(config, num_workers=num_workers, prefetch_batches=3), 6), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_same_batches(config, num_workers):
    config = with_data(config, num_workers=num_workers)
    expected = batches(config, 6)
    with create_data_loader(config) as loader:
        for _ in range(3):
            loader.sample_batch()
        state = loader.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    assert state["step"] == 3
    with create_data_loader(config) as loader:
        loader.load_state_dict({key: np.int64(value) for key, value in state.items()})
        assert_equal([loader.sample_batch() for _ in range(3)], expected[3:])


def test_two_processes_share_the_batch_of_one(config):
    (whole,) = batches(config, 1)
    parts = [batches(config, 1, process_index=i, process_count=2)[0] for i in range(2)]
    assert_equal(jax.tree.map(lambda *x: np.concatenate(x), *parts), whole)
    with pytest.raises(ValueError, match="24 cannot be split over 5 processes"):
        DataLoader(open_dataset(config), config, batch_size=24, process_index=0, process_count=5)


def test_cache_pool_and_decoder_give_equal_batches(config):
    from_cache = batches(config, 2)
    for episodes in (64, 0):
        without_cache = with_data(config, frame_cache_dir=None, episodes_per_memory_pool=episodes)
        assert_equal(batches(without_cache, 2), from_cache)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_memory_pool_moves_through_the_dataset_by_itself(config, caplog, num_workers):
    config = with_data(config, frame_cache_dir=None, episodes_per_memory_pool=2, num_workers=num_workers)
    with caplog.at_level(logging.WARNING), create_data_loader(config) as loader:
        assert "batches come from 2 of 6 episodes at a time, which other episodes replace every 4 steps" in caplog.text
        assert loader.steps_per_epoch == 4  # 315 frames x 2 of 6 episodes / 24
        taken = [loader.sample_batch() for _ in range(12)]
        seen = [{*np.unique([batch.episode_id for batch in taken[i : i + 4]]).tolist()} for i in (0, 4, 8)]
        assert [len(episodes) for episodes in seen] == [2, 2, 2]
        assert set.union(*seen) == set(range(6))
        assert loader.state_dict()["step"] == 12
    for step in (3, 4, 6):
        with create_data_loader(config) as loader:
            loader.load_state_dict({**loader.state_dict(), "step": step})
            assert_equal([loader.sample_batch() for _ in range(3)], taken[step : step + 3])


def test_a_pool_of_all_episodes_is_filled_once(config, monkeypatch):
    decoded = []
    read_frames = EpisodeSource.read_frames
    monkeypatch.setattr(
        EpisodeSource, "read_frames", lambda self, *args: decoded.append(args[0]) or read_frames(self, *args)
    )
    config = with_data(config, frame_cache_dir=None, episodes_per_memory_pool=6)
    with create_data_loader(config) as loader:
        before = len(decoded)
        for _ in range(loader.steps_per_epoch + 2):
            loader.sample_batch()
        assert len(decoded) == before > 0


def test_a_pool_of_episodes_shorter_than_a_chunk_is_no_mistake(config):
    with create_data_loader(config) as loader:
        lengths = np.diff(loader.dataset.table.offsets)
    horizon = int(lengths.max())
    assert lengths.min() < horizon
    config = with_data(config, frame_cache_dir=None, episodes_per_memory_pool=1)
    qchunking = dataclasses.replace(config.qchunking, horizon_length=horizon)
    model = dataclasses.replace(config.model, action_horizon=horizon)
    config = dataclasses.replace(config, qchunking=qchunking, model=model)
    with create_data_loader(config) as loader:
        taken = [loader.sample_batch() for _ in range(len(lengths) * loader.steps_per_epoch)]
    assert {bool(batch.valid.all(axis=1).any()) for batch in taken} == {True, False}


def test_a_cursor_of_another_run_is_refused_and_of_other_data_named(config, caplog):
    with create_data_loader(config) as loader:
        state = loader.state_dict()
        with pytest.raises(ValueError, match="seed 12, this run has seed 11"):
            loader.load_state_dict({**state, "seed": 12})
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict({**state, "dataset": 1})
        assert "the dataset is not the one" in caplog.text
    caplog.clear()
    with create_data_loader(with_data(config, max_episodes=3)) as loader:
        loader.load_state_dict(state)
    assert "the dataset is not the one" in caplog.text


def test_batches_on_devices(config):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    config = with_data(config, num_workers=2)
    on_device = batches(config, 8, device_sharding=sharding)
    for leaf in jax.tree.leaves(on_device[0]):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert on_device[0].observations.images["base_0_rgb"].dtype == np.uint8
    # All eight are alive, so none of their buffers was used twice.
    assert_equal(jax.tree.map(np.asarray, on_device), batches(config, 8))


def test_image_buffers_are_used_again(config):
    with DataLoader(open_dataset(config), config, batch_size=8) as loader:
        for _ in range(10):
            loader.sample_batch()
        assert loader._builders[0].buffers.allocated_bytes == 2 * 2 * 8 * SIZE * SIZE * 3


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("acrlpd-data")]


def test_closing_and_dropping_a_loader_ends_its_threads(config):
    config = with_data(config, num_workers=2)
    loader = create_data_loader(config)
    loader.sample_batch()
    loader.close()
    loader.close()
    assert loader_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        loader.sample_batch()
    loader = create_data_loader(config)
    loader.sample_batch()
    assert len(loader_threads()) == 2
    del loader
    gc.collect()
    for thread in loader_threads():
        thread.join(120)
    assert loader_threads() == []


def test_a_reading_error_reaches_the_training_loop(config, tmp_path):
    cache = shutil.copytree(config.data.frame_cache_dir, tmp_path / "cache")
    with create_data_loader(with_data(config, frame_cache_dir=str(cache), num_workers=2)) as loader:
        loader.sample_batch()
        for shard in cache.rglob("*.frames"):
            with shard.open("r+b") as file:
                file.truncate(1000)
        with pytest.raises(DatasetError, match="truncated"):
            for _ in range(10):
                loader.sample_batch()
