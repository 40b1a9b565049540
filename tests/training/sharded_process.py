"""Eight devices in one process: trains, saves, and reads checkpoints on other meshes. Prints what it found.

Arguments: a directory to train in, and the run directory of the same training on one device.
"""

import json
import pathlib
import re
import sys
import threading
from typing import Any

import jax
import numpy as np
from training_helpers import metrics_of, sharded_config

from acrlpd.config.create_agent import run_keys
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.training import drive
from acrlpd.training.checkpoints.reader import load_checkpoint_agent
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.learner import Learner
from acrlpd.training.sharding import (
    FSDPSharding,
    create_fsdp_mesh,
    create_sharding,
    validate_fsdp_sharding,
)
from acrlpd.training.trainer import Trainer


def train(directory: pathlib.Path) -> dict[str, Any]:
    """A few steps; counts compilations after the first one."""
    config = sharded_config(directory, fsdp_devices=4)
    sharding = create_sharding(config)
    run = directory / "run"
    run.mkdir(parents=True)
    loader = create_data_loader(config, device_sharding=sharding.data)
    trainer = Trainer(config, loader, Learner(sharding), run)
    trainer.initialize(create_initial_agent(config, sharding, run_keys(config).initial))
    at_birth = validate_fsdp_sharding(trainer.agent, sharding)
    compiled: list[int] = []

    def count(event: str, *_: Any, **__: Any) -> None:
        # Orbax compiles slices of arrays in the thread that writes; training does not wait for that.
        if "backend_compile" in event and threading.current_thread() is threading.main_thread():
            compiled.append(trainer.step)

    jax.monitoring.register_event_duration_secs_listener(count)
    drive.train([trainer])
    compiled_after_first_step = [step for step in compiled if step > 0]
    in_the_end = validate_fsdp_sharding(trainer.agent, sharding)
    program = trainer.learner.programs[True].as_text()
    trainer.close()
    loader.close()
    return {
        "total_bytes": at_birth.total_bytes,
        "device_bytes": at_birth.device_bytes,
        "misplaced": [*at_birth.misplaced, *in_the_end.misplaced],
        "compiled_after_first_step": compiled_after_first_step,
        "losses": [line["total_loss"] for line in metrics_of(run)],
        "gathered": gathered_shapes(program),
        "gathered_outside_loops": gathered_shapes(program[program.index("\nENTRY ") :]),
    }


def gathered_shapes(program: str) -> list[str]:
    """Result shapes of the all-gathers in a compiled program, one for each."""
    return sorted(re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", program))


def same_on_other_meshes(directory: pathlib.Path) -> bool:
    """A checkpoint on 1 device, on 2 x 4 and on 8: all bit for bit the same."""
    loaded = []
    for devices, fsdp_devices in ((1, 1), (8, 4), (8, 8)):
        mesh = create_fsdp_mesh(fsdp_devices, jax.devices()[:devices])
        sharding = FSDPSharding(mesh, 0.01)
        agent, step = load_checkpoint_agent(directory, sharding=sharding)
        assert step == 4
        assert validate_fsdp_sharding(agent, sharding)
        loaded.append([np.asarray(x).tobytes() for x in jax.tree.leaves(agent)])
    return loaded[0] == loaded[1] == loaded[2]


if __name__ == "__main__":
    root, one = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    result = train(root)
    result["same_elsewhere"] = same_on_other_meshes(root / "run")
    result["one_is_same_elsewhere"] = same_on_other_meshes(one)
    print(json.dumps(result))
