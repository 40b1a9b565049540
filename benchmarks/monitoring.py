"""What metrics cost: updates with and without them, in turns within one process.

    python benchmarks/monitoring.py                                      # a small pi0, as Markdown
    python benchmarks/monitoring.py --config aloha --batch_size 32       # full size, one 140 GB GPU

With: the update reports everything, the host fetches it two updates later, and every `log_frequency` updates a line
is written, judged for anomalies and handed to TensorBoard. Without: the same update reports its loss and nothing
else, so that the compiler leaves out what only metrics need. Data lies on the device in both.
"""

import argparse
import collections
import datetime
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from acrlpd.agents import Agent
from acrlpd.batch import Batch, first_batch
from acrlpd.config import RLTrainConfig, TrainingConfig, apply_config_overrides
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.monitoring.run_monitor import RunMonitor
from acrlpd.runs.metrics_log import MetricsLog
from acrlpd.training.sharding import (
    FSDPSharding,
    create_sharding,
    init_fsdp_train_state,
)
from acrlpd.training.trainer import MAX_IN_FLIGHT
from training_loop import make_config

Row = tuple[str, str]


def monitored_config(name: str, batch_size: int | None, log_frequency: int, directory: pathlib.Path) -> RLTrainConfig:
    """That of the loop's benchmark, with lines and a writer."""
    changes = {"logging.tensorboard": True, "training.log_frequency": log_frequency}
    return apply_config_overrides(make_config(name, batch_size, directory), changes)


class Metrics:
    """The trainer's bookkeeping around updates, without the trainer."""

    def __init__(self, config: RLTrainConfig, directory: pathlib.Path) -> None:
        self.log = MetricsLog(directory / "metrics.jsonl", config.training.log_frequency)
        self.monitor = RunMonitor(config, directory, is_primary=True)
        self.step = 0
        self.line_s: list[float] = []
        self.add_s: list[float] = []

    def collect(self, info: dict[str, jax.Array]) -> None:
        self.step += 1
        fetched = jax.device_get(info)
        start = time.perf_counter()
        is_due = self.log.add(self.step, fetched)
        self.add_s.append(time.perf_counter() - start)
        if is_due:
            start = time.perf_counter()
            timing = {"step_s": 0.1, "data_wait_s": 0.0, "steps_per_s": 10.0}
            self.log.write_line(self.step, "offline", timing, self.monitor.on_line)
            self.line_s.append(time.perf_counter() - start)


def compile_step(agent: Agent, batch: Batch, sharding: FSDPSharding, *, with_metrics: bool) -> Any:
    """The train step, compiled to report all of its metrics or its loss alone."""

    def step(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
        agent, info = agent.train_step(batch, rng)
        return agent, info if with_metrics else {"total_loss": info["total_loss"]}

    places = jax.tree.map(sharding.of_array, agent)
    jitted = jax.jit(
        step,
        in_shardings=(places, sharding.data, sharding.replicated),
        out_shardings=(places, sharding.replicated),
        donate_argnums=0,
    )
    with jax.set_mesh(sharding.mesh):
        return jitted.lower(agent, batch, jax.random.key(0)).compile()


def turn(step: Any, agent: Agent, batch: Batch, num_steps: int, collect: Any) -> tuple[Agent, float]:
    """Seconds per update of a turn, with as many updates under way as in training."""
    rng, in_flight = jax.random.key(0), collections.deque()
    start = time.perf_counter()
    for _ in range(num_steps):
        agent, info = step(agent, batch, rng)
        in_flight.append(info)
        if len(in_flight) > MAX_IN_FLIGHT:
            collect(in_flight.popleft())
    while in_flight:
        collect(in_flight.popleft())
    return agent, (time.perf_counter() - start) / num_steps


def measure(config: RLTrainConfig, directory: pathlib.Path, num_steps: int, turns: int) -> Iterator[Row]:
    sharding = create_sharding(config)
    with create_data_loader(config, device_sharding=sharding.data) as loader:
        feed = loader.sample_feed(1)
    batch = first_batch(feed)
    agent = init_fsdp_train_state(config, sharding, jax.random.key(0))
    metrics = Metrics(config, directory)
    metrics.monitor.before_update(1, agent, feed, jax.random.key(0))
    ways = {
        "without": (compile_step(agent, batch, sharding, with_metrics=False), jax.device_get),
        "with": (compile_step(agent, batch, sharding, with_metrics=True), metrics.collect),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step, collect in ways.values():
        agent, _ = turn(step, agent, batch, 3, collect)
    for i in range(turns):
        order = list(ways) if i % 2 else list(reversed(ways))  # neither always comes first
        for way in order:
            agent, seconds = turn(ways[way][0], agent, batch, num_steps, ways[way][1])
            times[way].append(seconds)
    bare, full = (statistics.median(times[way]) for way in ("without", "with"))
    ratios = [full / bare - 1 for bare, full in zip(times["without"], times["with"], strict=True)]
    add, line = statistics.median(metrics.add_s), statistics.median(metrics.line_s)
    frequency = TrainingConfig.log_frequency
    yield "update without metrics", f"{1e3 * bare:.2f} ms"
    yield "update with metrics", f"{1e3 * full:.2f} ms"
    yield (
        f"cost of metrics, median of {turns} pairs of turns of {num_steps} updates",
        f"{statistics.median(ratios):+.2%} ({min(ratios):+.2%} to {max(ratios):+.2%})",
    )
    traffic = [ways[way][0].cost_analysis()["bytes accessed"] for way in ("without", "with")]
    yield "memory traffic of the compiled update, by XLA", f"{traffic[1] / traffic[0] - 1:+.2%}"
    yield "host: adding one update to its line", f"{1e6 * add:.0f} us"
    yield f"host: a line, every {frequency} updates", f"{1e3 * line:.2f} ms"
    yield "host, both, as a share of an update", f"{(add + line / frequency) / bare:.3%}"
    metrics.monitor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--steps", type=int, default=100, help="updates per turn; each turn writes a line")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        frequency = min(TrainingConfig.log_frequency, options.steps)
        config = monitored_config(options.config, options.batch_size, frequency, directory)
        rows = list(measure(config, directory, options.steps, options.turns))
    device = jax.devices()[0]
    print(f"# Monitoring, {datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}\n")
    print(f"{len(jax.devices())} x {device.device_kind} ({platform.machine()}, {os.cpu_count()} cores), ", end="")
    print(f"jax {jax.__version__}, config {options.config}, batch size {config.batch_size}\n")
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
