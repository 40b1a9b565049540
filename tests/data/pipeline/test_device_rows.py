"""Data on the devices: the same windows as the host's, however the replay grows, or a reason why not."""

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_mixing import CONFIG, FIRST, Mixed, write_replay

from acrlpd.batch import Batch, StackedBatches, first_batch
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, get_config
from acrlpd.config.presets import debug
from acrlpd.data.pipeline import device_rows
from acrlpd.data.pipeline.device_rows import ROWS_CAPACITY, RowFeed, row_bytes
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.robots.generic import Generic

DEVICE = NamedSharding(Mesh(jax.devices()[:1], "batch"), PartitionSpec("batch"))


def changed(config: RLTrainConfig = CONFIG, **changes: Any) -> RLTrainConfig:
    return apply_config_overrides(config, {name.replace("__", "."): value for name, value in changes.items()})


@jax.jit
def take_batch(feed: RowFeed, index: jax.Array) -> Batch:
    return feed.batch(index)


def batches_of(mixed: Mixed, num_updates: int) -> list[Batch]:
    """The batches of one call, as the train step sees them."""
    feed = mixed.loader.sample_feed(num_updates)
    assert isinstance(feed, RowFeed) and feed.capacity == ROWS_CAPACITY
    return [jax.device_get(take_batch(feed, i)) for i in range(num_updates)]


def assert_same_batches(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(lambda x: (x.shape, x.dtype), other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("lengths", "ratio", "expected_rows", "success_ratio"),
    [
        ([7, 12, 3, 20, 9], 0.5, 1000, None),
        ([7, 12, 3, 20, 9], 0.0, 0, None),
        ([1, 2, 1], 0.25, 2, 0.7),
        ([5, 40], 1.0, 0, None),
        ([7, 200, 90], None, 0, None),
        ([7, 200, 90], None, 0, 0.5),
    ],
)
def test_windows_are_those_of_the_host(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    ratio: float | None,
    expected_rows: int,
    success_ratio: float | None,
) -> None:
    """Before the replay, with a part of the replay, and with all of it, also where it outgrows its place."""
    monkeypatch.setattr(device_rows, "expected_replay_rows", lambda config: expected_rows)
    monkeypatch.setattr(device_rows, "_BLOCK", 1)
    monkeypatch.setattr(device_rows, "_CHUNK", 16)  # episodes are shorter and longer than what is written at once
    replays = [write_replay(tmp_path / name, lengths) for name in ("host", "device")]
    config = changed(qchunking__success_ratio=success_ratio)
    with Mixed(replays[0], config) as host, Mixed(replays[1], config, device_sharding=DEVICE) as device:
        expected = host.batches(3)
        assert any((batch.importance != 1).any() for batch in expected) == (success_ratio is not None)
        assert all(set(batch.leads_to_success.tolist()) == {0.0, 1.0} for batch in expected)
        assert_same_batches(batches_of(device, 3), expected)
        for numbers in (range(FIRST, FIRST + 1), range(FIRST + 1, FIRST + len(lengths))):
            for mixed in (host, device):
                mixed.admit(numbers, ratio)
            assert_same_batches(batches_of(device, 2), host.batches(2))
            assert device.loader.state_dict() == host.loader.state_dict()


@pytest.mark.parametrize(("online_steps", "start_steps"), [(100, 50), (2, 20)])
def test_rounds_that_fit_into_the_expected_rows_change_no_shape(
    tmp_path: pathlib.Path, online_steps: int, start_steps: int
) -> None:
    """A changed shape would mean another compile. The rounds of a short phase may be longer than what it needs."""
    config = changed(training__online_steps=online_steps, online__start_steps=start_steps)
    with Mixed(write_replay(tmp_path, [40, 40, 40]), config, device_sharding=DEVICE) as mixed:
        shapes = []
        for number in range(3):
            mixed.admit(range(FIRST + number, FIRST + number + 1), 0.5)
            shapes.append(jax.tree.map(np.shape, mixed.loader.sample_feed(1)))
        assert shapes[0] == shapes[1] == shapes[2]


def test_a_baseline_has_the_shapes_of_its_run() -> None:
    """Without replay, and with the half of the episodes that succeeded: another shape would mean another compile."""
    run = changed(training__online_steps=1200, online__start_steps=500, online__update_to_data_ratio=0.125)
    shapes = []
    for config in (run, changed(training__online_steps=0), changed(data__max_episodes=4)):
        with create_data_loader(config, device_sharding=DEVICE) as loader:
            shapes.append(jax.tree.map(np.shape, loader.sample_feed(1)))
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("preset", ["quickstart", "quickstart_recap"])
def test_prompts_are_those_of_the_host(preset: str) -> None:
    """The tiny pi0 of the quick start reads a prompt, and sees no image. RECAP adds labelled prompts and returns."""
    config = changed(get_config(preset), data__repo_id="fake", data__num_workers=0)
    with create_data_loader(config) as host, create_data_loader(config, device_sharding=DEVICE) as device:
        expected, feed = [host.sample_batch() for _ in range(2)], device.sample_feed(2)
        assert isinstance(feed, RowFeed) and expected[0].observations.tokenized_prompt is not None
        assert (expected[0].returns is not None) == (preset == "quickstart_recap")
        assert_same_batches([jax.device_get(take_batch(feed, i)) for i in range(2)], expected)
        table = jax.tree.leaves(feed.table)
        assert sum(column.nbytes for column in table) == len(table[0]) * row_bytes(config)


def test_batches_of_the_host_travel_together() -> None:
    config = changed(data__on_device="never")
    with create_data_loader(config) as host, create_data_loader(config, device_sharding=DEVICE) as device:
        expected, feed = [host.sample_batch() for _ in range(3)], device.sample_feed(3)
        assert isinstance(feed, StackedBatches) and feed.capacity > 3
        found = [jax.device_get(feed.batch(i)) for i in range(3)]
        assert_same_batches(found, expected)
        assert_same_batches([jax.device_get(first_batch(device.sample_feed(1)))], [host.sample_batch()])


@dataclasses.dataclass(frozen=True)
class Smoothing(Generic):
    """A robot of a user, whose actions depend on the other actions of their chunk."""

    def inputs(self, data: Any) -> Any:
        data = super().inputs(data)
        return {**data, "actions": data["actions"] - data["actions"].mean(axis=1, keepdims=True)}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(data__use_delta_joint_actions=True, data__delta_action_mask=(4, -1)), "action by action"),
        (
            dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, robot=Smoothing())),
            "action by action",
        ),
        (debug.CONFIG, "sees images"),
    ],
)
def test_what_cannot_be_gathered_stays_on_the_host(config: RLTrainConfig, reason: str) -> None:
    config = changed(config, data__tokenizer="byte")
    with create_data_loader(config, device_sharding=DEVICE) as loader:
        assert isinstance(loader.sample_feed(1), StackedBatches)
    with pytest.raises(ConfigError, match=rf"data\.on_device=always: .*{reason}.*; use data\.on_device=auto"):
        create_data_loader(changed(config, data__on_device="always"), device_sharding=DEVICE)


def test_data_that_does_not_fit_stays_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_rows, "_device_memory", lambda sharding: 40_000)
    with caplog.at_level(logging.DEBUG), create_data_loader(CONFIG, device_sharding=DEVICE) as loader:
        assert isinstance(loader.sample_feed(1), StackedBatches)
    with pytest.raises(ConfigError, match=r"rows need .* MiB on each device, more than the 3.91 KiB"):
        create_data_loader(changed(data__on_device="always"), device_sharding=DEVICE)


@pytest.mark.parametrize("on_device", ["always", "never"])
def test_more_updates_than_a_feed_serves_are_refused(on_device: str) -> None:
    with create_data_loader(changed(data__on_device=on_device), device_sharding=DEVICE) as loader:
        with pytest.raises(ValueError, match=rf"serves 1 to {loader.capacity} updates; found {loader.capacity + 1}"):
            loader.sample_feed(loader.capacity + 1)
        assert loader.state_dict()["step"] == 0
    with pytest.raises(RuntimeError, match="the data loader was closed"):
        loader.sample_feed(1)
