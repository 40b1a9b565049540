"""Eight devices in one process: trains, saves, and reads back on other meshes. Prints what it found."""

import json
import pathlib
import re
import sys
import threading
from typing import Any

import jax
import numpy as np
from training_helpers import pi0_config

from acrlpd.data.loader import create_acrlpd_data_loader
from acrlpd.training.checkpoints import load_acrlpd_checkpoint
from acrlpd.training.sharding import (
    FSDPSharding,
    create_fsdp_mesh,
    validate_fsdp_sharding,
)
from acrlpd.training.trainer import ACRLPDTrainer

STEPS = 4


def train(directory: pathlib.Path, devices: int, fsdp_devices: int) -> dict[str, Any]:
    """Four steps; counts compilations after the first one."""
    config = pi0_config(
        directory,
        fsdp_devices=fsdp_devices,
        fsdp__min_size_mib=0.01,
        offline_steps=STEPS,
        log_frequency=1,
    )
    sharding = FSDPSharding(create_fsdp_mesh(fsdp_devices, jax.devices()[:devices]), config.fsdp.min_size_mib)
    run = directory / "run"
    run.mkdir(parents=True)
    loader = create_acrlpd_data_loader(config, device_sharding=sharding.data)
    trainer = ACRLPDTrainer(config, loader, sharding, run)
    trainer.initialize()
    at_birth = validate_fsdp_sharding(trainer.agent, sharding)
    compiled: list[int] = []

    def count(event: str, *_: Any, **__: Any) -> None:
        # Orbax compiles slices of arrays in the thread that writes, which holds nobody up.
        if "backend_compile" in event and threading.current_thread() is threading.main_thread():
            compiled.append(trainer.step)

    jax.monitoring.register_event_duration_secs_listener(count)
    trainer.train()
    compiled_after_first_step = [step for step in compiled if step > 0]
    in_the_end = validate_fsdp_sharding(trainer.agent, sharding)
    program = trainer._train_steps[True].as_text()
    trainer.close()
    loader.close()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {
        "total_bytes": at_birth.total_bytes,
        "device_bytes": at_birth.device_bytes,
        "misplaced": [*at_birth.misplaced, *in_the_end.misplaced],
        "compiled_after_first_step": compiled_after_first_step,
        "losses": [json.loads(line)["total_loss"] for line in lines],
        "gathered": gathered_shapes(program),
    }


def gathered_shapes(program: str) -> list[str]:
    """Result shapes of all all-gathers in a compiled program."""
    return sorted(set(re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", program)))


def same_on_other_meshes(directory: pathlib.Path) -> bool:
    """A checkpoint of 8 devices on 1, on 2 x 4 and on 8, all bit for bit the same."""
    loaded = []
    for devices, fsdp_devices in ((1, 1), (8, 4), (8, 8)):
        mesh = create_fsdp_mesh(fsdp_devices, jax.devices()[:devices])
        sharding = FSDPSharding(mesh, 0.01)
        agent, step = load_acrlpd_checkpoint(directory / "run", sharding=sharding)
        assert step == STEPS
        assert validate_fsdp_sharding(agent, sharding)
        loaded.append([np.asarray(x).tobytes() for x in jax.tree.leaves(agent)])
    return loaded[0] == loaded[1] == loaded[2]


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    result = {"eight": train(root / "eight", 8, 4), "one": train(root / "one", 1, 1)}
    result["eight_elsewhere"] = same_on_other_meshes(root / "eight")
    result["one_elsewhere"] = same_on_other_meshes(root / "one")
    print(json.dumps(result))
