"""What the checksums of a checkpoint cost: the share of a load that they take. Prints a Markdown table.

    python benchmarks/checksums.py                # 1 GB in params/, 3 GB in all
    python benchmarks/checksums.py --gb 0.05      # a smoke test

A checkpoint of a wide state-space policy is saved and loaded as the product does it: `restore_agent` is what --resume
does, `load_model` is what serving, evaluation and export do. Loads with checks, loads without checks, and the checks
alone alternate, from the page cache and from the disk (the pages of all files are given back before). Each number is
the shortest of its repetitions. Seconds of the processors are those of all threads of this process, and depend little
on what else the machine does.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.checksums import read_checksums, verified
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


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The shortest of several repetitions, by the clock and of the processors."""

    clock: float
    processors: float


def measure(
    load: Callable[[], Any], check: Callable[[], None], prepare: Callable[[], None], repetitions: int
) -> dict[str, Seconds]:
    """A load without checks, a load with checks, and the checks alone, in turn."""
    found: dict[str, list[tuple[float, float]]] = {"unchecked": [], "checked": [], "check alone": []}
    for _ in range(repetitions):
        for name, times in found.items():
            prepare()
            with unchecked() if name == "unchecked" else contextlib.nullcontext():
                start, cpu = time.perf_counter(), time.process_time()
                result = check() if name == "check alone" else jax.block_until_ready(load())
                times.append((time.perf_counter() - start, time.process_time() - cpu))
            del result
    return {name: Seconds(*map(min, zip(*times, strict=True))) for name, times in found.items()}


def check_alone(step: pathlib.Path, parts: Sequence[str]) -> None:
    with verified(*(step / part for part in parts)):
        pass


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
        print(f"A save of {sum(sizes.values()):.2f} GB takes {saves[0]:.1f} s, {saves[1]:.1f} s without checksums.\n")
        abstract = abstract_train_state(rl_config, create_sharding(rl_config))
        loads: dict[str, tuple[Callable[[], Any], Sequence[str]]] = {
            "resume (`restore_agent`)": (lambda: manager.restore_agent(step, abstract), ITEMS),
            "serve (`load_model`)": (lambda: policies.open_checkpoint(step).load_model(), ITEMS[:2]),
        }
        print("| load | GB | from | without checks | with checks | | processors: without | checks alone | share |")
        print("|---|---|---|---|---|---|---|---|---|")
        for title, (load, parts) in loads.items():
            check = functools.partial(check_alone, step, parts)
            for place, prepare in (("memory", lambda: None), ("disk", lambda: drop_pages(step))):
                load()
                times = measure(load, check, prepare, args.repetitions)
                plain, checked, alone = times.values()
                print(
                    f"| {title} | {sum(sizes[part] for part in parts):.2f} | {place} | {plain.clock:.2f} s "
                    f"| {checked.clock:.2f} s | {checked.clock / plain.clock - 1:+.1%} | {plain.processors:.2f} s "
                    f"| {alone.processors:.2f} s | {alone.processors / plain.processors:.1%} |",
                    flush=True,
                )
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
