"""What the machinery around the train step costs.

    python benchmarks/training_loop.py                    # all parts that fit a laptop, as Markdown
    python benchmarks/training_loop.py --parts overhead,checkpoint --config full --steps 6 --saves 2   # one 140 GB GPU

Parts:
  overhead    steps/s of the trainer (data, metrics, logging, progress) against the bare compiled step on a batch
              that lies on the device, in turns within one process
  checkpoint  how long a save holds up the loop, how long it takes in all, and how long a restore takes
  start       from the start of the process to the first step, with a warm compilation cache
  fsdp        bytes of the full-size state on one of 8 devices, and what the compiled step gathers (8 virtual
              devices on a CPU; compiles for a minute)

`--config tiny` (the default) is a small pi0 whose step takes about 100 ms on two cores; `full` is pi0 at full size, all
of it trained, on fake data, and needs 80 GB of host memory and 52 GB of disk.
"""

import argparse
import datetime
import os
import pathlib
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from acrlpd.agents import Call
from acrlpd.batch import Feed, StackedBatches
from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config, save_config
from acrlpd.config.create_agent import run_keys
from acrlpd.config.plan.accelerators import MEMORY_FRACTION
from acrlpd.config.plan.flops import batch_spec
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.process import setup_logging
from acrlpd.training.checkpoints.reader import restore_agent
from acrlpd.training.drive import drive
from acrlpd.training.initial_weights import create_initial_agent
from acrlpd.training.learner import Learner
from acrlpd.training.sharding import (
    abstract_train_state,
    compile_train_steps,
    create_sharding,
    validate_fsdp_sharding,
)
from acrlpd.training.trainer import Trainer

Row = tuple[str, str]
PARTS = ("overhead", "checkpoint", "start", "fsdp")


def make_config(name: str, batch_size: int | None, directory: pathlib.Path) -> RLTrainConfig:
    """A preset on fake data; `tiny` is `debug` with a larger batch, `full` is `aloha_seeds` with nothing frozen."""
    config = get_config({"tiny": "debug", "full": "aloha_seeds"}.get(name, name))
    sizes = {"tiny": 64, "full": 32}
    changes: dict[str, Any] = {
        "batch_size": batch_size or sizes.get(name, config.batch_size),
        "checkpoints.directory": str(directory),
        "data.repo_id": "fake",
        "data.data_dir": None,
        "data.tokenizer": "byte",
        "training.save_frequency": 10**9,
        "training.eval_frequency": 0,
        "weight_loader.kind": "none",
    }
    if name == "full":
        changes |= {"freeze_pi0_backbone": False, "gradient_accumulation_steps": 1}
    return apply_config_overrides(config, changes)


def make_trainers(config: RLTrainConfig, directory: pathlib.Path, num_runs: int = 1) -> list[Trainer]:
    """The trainers of runs that differ in their seed and train together."""
    learner, trainers = Learner(create_sharding(config)), []
    for run in range(num_runs):
        member, where = apply_config_overrides(config, seed=run), directory / str(run)
        like = trainers[0]._loader if trainers else None
        place = learner.sharding.data
        loader = create_data_loader(member, device_sharding=place, num_runs=num_runs, like=like)
        where.mkdir(parents=True, exist_ok=True)
        trainers.append(Trainer(member, loader, learner, where, run=run))
        trainers[run].initialize(create_initial_agent(member, learner.sharding, run_keys(member).initial))
    return trainers


def train_for(trainers: list[Trainer], num_steps: int) -> float:
    """Seconds per step of the trainers' own loop; no checkpoint."""
    start, last = time.perf_counter(), trainers[0].step + num_steps
    drive(trainers, [trainer.train_until(last) for trainer in trainers])
    for trainer in trainers:
        trainer._collect(leave=0)
    return (time.perf_counter() - start) / num_steps


def bare_steps(trainers: list[Trainer], feeds: list[Feed], num_steps: int) -> float:
    """Seconds per step of the compiled program alone, in the longest calls that it allows."""
    calls = [t._call(feed) for feed, t in zip(feeds, trainers, strict=True)]
    start, left = time.perf_counter(), num_steps
    while left:
        length = min(left, feeds[0].capacity)
        metrics = trainers[0].learner.update(calls, range(len(calls)), length, update_policy=True)
        left -= length
    jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / num_steps


def measure_overhead(config: RLTrainConfig, directory: pathlib.Path, num_steps: int, num_runs: int) -> Iterator[Row]:
    trainers = make_trainers(config, directory / "overhead", num_runs)
    feeds = [trainer._loader.sample_feed(trainer._loader.capacity) for trainer in trainers]
    train_for(trainers, 5)
    bare_steps(trainers, feeds, 3)
    train_for(trainers, num_steps)  # until the length of a call has settled
    pairs = []
    for _ in range(3):
        bare = bare_steps(trainers, feeds, num_steps)
        pairs.append((bare, train_for(trainers, num_steps)))
    bare, loop = (statistics.median(times) for times in zip(*pairs, strict=True))
    yield "bare compiled step", f"{1e3 * bare:.2f} ms"
    yield "step of the trainer", f"{1e3 * loop:.2f} ms"
    ratios = [bare / loop for bare, loop in pairs]
    yield (
        "trainer / bare, steps per second",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )
    for trainer in trainers:
        trainer.close()
        trainer._loader.close()


def measure_checkpoint(config: RLTrainConfig, directory: pathlib.Path, num_saves: int) -> Iterator[Row]:
    [trainer] = make_trainers(config, directory / "checkpoint")
    train_for([trainer], 3)
    yield "state", f"{sum(x.nbytes for x in jax.tree.leaves(trainer.agent)) / 2**30:.2f} GiB"
    stalls, saves = [], []
    for _ in range(num_saves):
        if saves:  # a disk need not hold two
            trainer.writer._manager.delete(trainer.step)
        train_for([trainer], 2)
        start = time.perf_counter()
        trainer.save_checkpoint()
        stalls.append(time.perf_counter() - start)
        trainer.writer.wait()
        saves.append(time.perf_counter() - start)
    if trainer.writer.num_failures:
        raise SystemExit("a save failed; see above")
    yield "loop held up by a save", f"{min(stalls):.3f} to {max(stalls):.3f} s"
    yield "copy on the devices first", "yes" if trainer.writer._on_device else "no, to the host"
    # In order: the first one asks the system for memory that the later ones find.
    yield "saves, until they are complete on disk", ", ".join(f"{seconds:.1f} s" for seconds in saves)
    yield "host memory, at most, in the saves", f"{_peak_memory():.1f} GiB"
    step_directory = trainer.directory / str(trainer.step)
    sharding = trainer.learner.sharding
    trainer.learner.agents.clear()
    abstract = abstract_train_state(config, sharding)
    start = time.perf_counter()
    agent = restore_agent(step_directory, abstract)
    jax.block_until_ready(agent)
    yield "restore", f"{time.perf_counter() - start:.1f} s"
    yield "host memory, at most, with the restore", f"{_peak_memory():.1f} GiB"
    trainer.close()
    trainer._loader.close()


def _peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_start(config: RLTrainConfig, directory: pathlib.Path) -> Iterator[Row]:
    """Twice with an empty cache directory: the first run fills it."""
    config = apply_config_overrides(config, offline_steps=1, log_frequency=1)
    path = directory / "start.yaml"
    save_config(config, path)
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(directory / "xla")}
    for name in ("cold", "warm"):
        command = [
            sys.executable,
            "-m",
            "acrlpd.cli.main",
            "train",
            "--config",
            str(path),
            "--overwrite",
            "--ignore_plan",
        ]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("first step"):
                yield f"process start to first step, {name} cache", f"{time.perf_counter() - start:.1f} s"
        if process.wait():
            raise SystemExit("the run failed")


def measure_fsdp() -> Iterator[Row]:
    """In a process of its own, which has 8 devices."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--parts", "fsdp_worker"]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in output.splitlines():
        name, _, value = line.partition("\t")
        yield name, value


def fsdp_worker() -> None:
    config = get_config("aloha_seeds")
    config = apply_config_overrides(
        config,
        {"fsdp.fsdp_devices": 8, "batch_size": 32, "freeze_pi0_backbone": False, "gradient_accumulation_steps": 1},
    )
    sharding = create_sharding(config)
    agent = abstract_train_state(config, sharding)
    report = validate_fsdp_sharding(agent, sharding)
    print(f"full-size state, in all\t{report.total_bytes / 2**30:.2f} GiB")
    share = report.device_bytes / report.total_bytes
    print(f"full-size state, on each of 8 devices\t{report.device_bytes / 2**30:.2f} GiB ({share:.2%}; 1/8 is 12.5 %)")
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.data), batch_spec(config))
    call = Call(StackedBatches(batch), np.zeros(1, np.float32), jax.random.key(0))
    compiled = compile_train_steps([agent], [call], sharding)
    memory = compiled.memory_analysis()
    print(f"compiled step, arguments per device (XLA)\t{memory.argument_size_in_bytes / 2**30:.2f} GiB")
    print(f"compiled step, temporaries per device (XLA, CPU)\t{memory.temp_size_in_bytes / 2**30:.2f} GiB")
    program = compiled.as_text()
    shapes = set(gathered_shapes(program))
    depths = {config.model.paligemma.depth, config.model.siglip.depth}  # type: ignore[union-attr]
    stacked = [shape for shape in shapes if len(shape) >= 3 and shape[0] in depths]
    largest = max(shapes, key=lambda shape: np.prod(shape))
    print(f"largest all-gather\t{list(largest)}, {np.prod(largest) / 1e6:.0f} M elements")
    print(f"all-gathers of a whole stack of layers\t{len(stacked)}")
    outside_loops = gathered_shapes(program[program.index("\nENTRY ") :])
    elements = sum(int(np.prod(shape)) for shape in outside_loops)
    print(f"all-gathers outside the loops over layers, in all\t{elements / 1e6:.0f} M elements")


def gathered_shapes(program: str) -> list[tuple[int, ...]]:
    """Result shapes of the all-gathers in a compiled program, one for each."""
    texts = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", program)
    return [tuple(int(n) for n in text.split(",") if n) for text in texts]


def print_table(title: str, rows: Iterator[Row]) -> None:
    print(f"\n## {title}\n\n| | |\n|---|---|", flush=True)
    for name, value in rows:
        print(f"| {name} | {value} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--steps", type=int, default=30, help="steps per turn of the overhead part")
    parser.add_argument("--runs", type=int, default=1, help="runs that train together in the overhead part")
    parser.add_argument("--saves", type=int, default=2, help="saves of the checkpoint part")
    parser.add_argument("--directory", type=pathlib.Path, help="where checkpoints go; a temporary one by default")
    options = parser.parse_args()
    if options.parts == "fsdp_worker":
        fsdp_worker()
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))  # as `acrlpd train` does
    setup_logging()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = jax.devices()[0]
    print(f"# Training loop, {datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}\n")
    print(f"{len(jax.devices())} x {device.device_kind} ({platform.machine()}, {os.cpu_count()} cores), ", end="")
    print(f"jax {jax.__version__}, config {options.config}")
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        directory = pathlib.Path(temporary)
        config = make_config(options.config, options.batch_size, directory)
        parts = {
            "overhead": lambda: measure_overhead(config, directory, options.steps, options.runs),
            "checkpoint": lambda: measure_checkpoint(config, directory, options.saves),
            "start": lambda: measure_start(config, directory),
            "fsdp": measure_fsdp,
        }
        for part in options.parts.split(","):
            print_table(part, parts[part]())


if __name__ == "__main__":
    main()
