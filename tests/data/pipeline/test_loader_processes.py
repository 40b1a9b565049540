"""Real processes: each loads its part, together they hold the batch of a single process."""

import pathlib
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config
from acrlpd.data.pipeline.loader import create_data_loader

STEPS = 3
PROGRAM = """
import sys
import jax
import numpy as np
sys.path.insert(0, sys.argv[4])
from acrlpd.data.pipeline.device_rows import RowFeed
from acrlpd.data.pipeline.loader import create_data_loader
from test_loader_processes import STEPS, config_with_images, config_without_images, fields

port, index, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
arrays = {}
with create_data_loader(config_with_images(), device_sharding=sharding) as loader:
    for _ in range(STEPS):
        batch = loader.sample_batch()
arrays |= fields("images", batch)
with create_data_loader(config_without_images(), device_sharding=sharding) as loader:
    feed = loader.sample_feed(STEPS)
assert isinstance(feed, RowFeed) and not feed.table.actions.is_fully_addressable
arrays |= fields("rows", jax.jit(lambda feed: feed.batch(STEPS - 1), out_shardings=sharding)(feed))
found = {}
for name, array in arrays.items():
    assert not array.is_fully_addressable
    found[name] = np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])
    found[name + " at"] = np.concatenate([np.arange(len(array))[s.index[0]] for s in array.addressable_shards])
np.savez(out, **found)
"""


def config_with_images() -> RLTrainConfig:
    return get_config("debug")


def config_without_images() -> RLTrainConfig:
    """Its data lies on the devices, half of the rows on each."""
    return apply_config_overrides(get_config("quickstart"), {"data.repo_id": "fake", "batch_size": 8})


def fields(kind: str, batch: Batch) -> dict[str, Any]:
    named = {"state": batch.observations.state, "actions": batch.actions, "step_id": batch.step_id}
    named |= {"later": batch.next_observations.state, "tokens": batch.observations.tokenized_prompt}
    named |= batch.observations.images
    return {f"{kind} {name}": array for name, array in named.items()}


def last_batch(config: RLTrainConfig) -> Batch:
    with create_data_loader(config) as loader:
        return [loader.sample_batch() for _ in range(STEPS)][-1]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes holds."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    outs = [tmp_path_factory.mktemp("parts") / f"{index}.npz" for index in range(2)]
    here = str(pathlib.Path(__file__).parent)
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, port, str(index), str(out), here])
        for index, out in enumerate(outs)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [np.load(out) for out in outs]


@pytest.mark.parametrize(("kind", "make_config"), [("images", config_with_images), ("rows", config_without_images)])
def test_two_processes_hold_the_batch_of_one(parts: list[Any], kind: str, make_config: Any) -> None:
    for name, expected in fields(kind, last_batch(make_config())).items():
        places = np.concatenate([part[f"{name} at"] for part in parts])
        assert sorted(places.tolist()) == list(range(8))
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), expected[places])
