"""What the checksums of a checkpoint cost: the share of a load that they take. Prints a Markdown table.

    python benchmarks/checksums.py                # 1 GB in params/, 3 GB in all
    python benchmarks/checksums.py --gb 0.05      # a smoke test

A checkpoint of a wide state-space policy is saved and loaded as the product does it: `restore_agent` is what --resume
does, `load_model` is what serving, evaluation and export do. Loads with and without checks alternate, from the page
cache and from the disk (the pages of all files are given back before). Seconds of the clock are medians; seconds of the
processors are those of all threads of this process, and depend less on what else the machine does.
"""

import argparse
import contextlib
import dataclasses
import datetime
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.checksums import read_checksums, verified, write_checksums
from acrlpd.config import RLTrainConfig, get_config
from acrlpd.models import openpi_checkpoint
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.policies import checkpoint as policies
from acrlpd.training.checkpoints import items, manager
from acrlpd.training.sharding import abstract_train_state, create_sharding

ITEMS = ("params", "critic", "train_state")


def wide_config(gigabytes: float) -> RLTrainConfig:
    """A policy with so many GB of parameters in 4 hidden layers."""
    width = int((gigabytes * 1e9 / 4 / 3) ** 0.5)
    base = get_config("debug")
    return dataclasses.replace(
        base,
        model=StateFlowPolicyConfig(state_dim=7, action_dim=7, action_horizon=10, hidden_dims=(width,) * 4),
        critic=dataclasses.replace(base.critic, use_pi0_features=False),
        acrlpd=dataclasses.replace(base.acrlpd, ema_decay=None),
    )


def draw_agent(rl_config: RLTrainConfig) -> Agent:
    random = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(random.random(x.shape, np.float32).astype(x.dtype), x.sharding)

    return jax.tree.map(draw, abstract_train_state(rl_config, create_sharding(rl_config)))


def save(rl_config: RLTrainConfig, agent: Agent, directory: pathlib.Path, step: int) -> float:
    """Seconds of a save, from its start to the complete checkpoint."""
    writer = manager.CheckpointWriter(directory, rl_config, {})
    writer.prepare(agent)
    start = time.perf_counter()
    writer.save(agent, step, rng=jax.random.key(0), state={})
    writer.wait()
    seconds = time.perf_counter() - start
    writer.close()
    return seconds


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """The product without its checks of array files."""

    def skip(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with contextlib.ExitStack() as stack:
        for module in (openpi_checkpoint, policies, manager):
            stack.enter_context(mock.patch.object(module, "verified", skip))
        yield


def drop_pages(directory: pathlib.Path) -> None:
    """Gives the pages of all files back, so that the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(load: Callable[[], Any], prepare: Callable[[], None], repetitions: int) -> dict[str, tuple[float, float]]:
    """Medians of seconds by the clock and of the processors, with and without checks, in turn."""
    found: dict[str, list[tuple[float, float]]] = {"checked": [], "unchecked": []}
    for _ in range(repetitions):
        for name, times in found.items():
            prepare()
            with unchecked() if name == "unchecked" else contextlib.nullcontext():
                start, cpu = time.perf_counter(), time.process_time()
                result = jax.block_until_ready(load())
                times.append((time.perf_counter() - start, time.process_time() - cpu))
            del result
    return {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in found.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    rl_config = wide_config(args.gb)
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.processor() or platform.machine()}, ", end="")
    print(f"Python {platform.python_version()}, JAX {jax.__version__}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        directory = pathlib.Path(name)
        agent = draw_agent(rl_config)
        saves = [save(rl_config, agent, directory, 1)]
        with mock.patch.object(items, "write_checksums"):
            saves.append(save(rl_config, agent, directory / "unchecked", 1))
        del agent
        step = directory / "1"
        files = {item: read_checksums(step / item) for item in ITEMS}
        sizes = {item: sum(recorded.size for recorded in files[item].values()) / 1e9 for item in ITEMS}
        start = time.perf_counter()
        write_checksums(step / "train_state")
        rate = sizes["train_state"] / (time.perf_counter() - start)
        start, cpu = time.perf_counter(), time.process_time()
        with verified(*(step / item for item in ITEMS)):
            pass
        alone, alone_cpu = time.perf_counter() - start, time.process_time() - cpu
        total = sum(sizes.values())
        print(
            f"A save of {total:.2f} GB takes {saves[0]:.1f} s with checksums, {saves[1]:.1f} s without, in its thread."
        )
        print(f"Checksums are computed at {rate:.1f} GB/s from the page cache, by all threads together.")
        print(f"To check {total:.2f} GB alone takes {alone:.2f} s, {alone_cpu:.2f} s of the processors.\n")
        abstract = abstract_train_state(rl_config, create_sharding(rl_config))
        loads: dict[str, tuple[Callable[[], Any], float]] = {
            "resume (`restore_agent`)": (lambda: manager.restore_agent(step, abstract), total),
            "serve (`load_model`)": (
                lambda: policies.open_checkpoint(step).load_model(),
                sizes["params"] + sizes["critic"],
            ),
        }
        print("| load | GB | from | unchecked | checked | share | processors: unchecked | checked | share |")
        print("|---|---|---|---|---|---|---|---|---|")
        for title, (load, gigabytes) in loads.items():
            for place, prepare in (("memory", lambda: None), ("disk", lambda: drop_pages(step))):
                load()
                times = measure(load, prepare, args.repetitions)
                (wall, cpu), (plain_wall, plain_cpu) = times["checked"], times["unchecked"]
                print(
                    f"| {title} | {gigabytes:.2f} | {place} | {plain_wall:.2f} s | {wall:.2f} s "
                    f"| {wall / plain_wall - 1:+.1%} | {plain_cpu:.2f} s | {cpu:.2f} s | {cpu / plain_cpu - 1:+.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
