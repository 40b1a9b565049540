"""Real processes: each loads its part, together they hold the batch of a single process."""

import socket
import subprocess
import sys

import numpy as np

from acrlpd.config.presets import debug
from acrlpd.data.pipeline.loader import create_data_loader

PROGRAM = """
import sys
import jax
import numpy as np
from acrlpd.config.presets import debug
from acrlpd.data.pipeline.loader import create_data_loader

port, index, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
with create_data_loader(debug.CONFIG, device_sharding=sharding) as loader:
    for _ in range(3):
        batch = loader.sample_batch()
arrays = {"image": batch.observations.images["base_0_rgb"], "actions": batch.actions, "step_id": batch.step_id}
found = {}
for name, array in arrays.items():
    assert array.shape[0] == debug.CONFIG.batch_size and not array.is_fully_addressable
    found[name] = np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])
    found[name + "_rows"] = np.concatenate([np.arange(len(array))[s.index[0]] for s in array.addressable_shards])
np.savez(out, **found)
"""


def test_two_processes_hold_the_batch_of_one(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    outs = [tmp_path / f"{index}.npz" for index in range(2)]
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, port, str(index), str(out)]) for index, out in enumerate(outs)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    with create_data_loader(debug.CONFIG) as loader:
        for _ in range(3):
            batch = loader.sample_batch()
    whole = {"image": batch.observations.images["base_0_rgb"], "actions": batch.actions, "step_id": batch.step_id}
    parts = [np.load(out) for out in outs]
    for name, expected in whole.items():
        rows = np.concatenate([part[f"{name}_rows"] for part in parts])
        assert sorted(rows.tolist()) == list(range(8))
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), expected[rows])
