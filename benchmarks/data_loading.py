"""How fast episodes become batches: norm statistics, cached windows, and whether a train step is kept fed.

Run on an otherwise idle machine:  python benchmarks/data_loading.py
A sample is one window: 3 cameras of 224 x 224 at t and at t + 50, 14-dim state, 50 actions of 14 dims.
"""

import argparse
import dataclasses
import datetime
import functools
import os
import platform
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, RLTrainConfig
from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.pipeline.config_episodes import read_windows
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.data.pipeline.norm_stats import compute_norm_stats
from acrlpd.data.sources.source import ColumnTable, EpisodeSource, Feature
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

HORIZON = 50
DIM = 14
SIZE = 224
CAMERAS = ("top", "left_wrist", "right_wrist")


class SyntheticSource(EpisodeSource):
    """Smooth random motion and noise images, without a file: the cache is what is measured."""

    format = "synthetic"
    fps = 50.0
    root = Path("synthetic")
    cameras = CAMERAS

    def __init__(self, num_episodes: int, length: int) -> None:
        self.indices = tuple(range(num_episodes))
        self.length = length
        self.features = {name: Feature("float32", (DIM,)) for name in ("observation.state", "action")}
        self.features |= {name: Feature("float32", ()) for name in ("next.reward", "next.success")}
        self.features |= {camera: Feature("image", (SIZE, SIZE, 3)) for camera in CAMERAS}
        self._noise = np.random.default_rng(0).integers(0, 256, (64, SIZE, SIZE, 3), np.uint8)

    @property
    def identity(self) -> str:
        return f"synthetic {len(self.indices)} x {self.length}"

    def _length(self, index: int) -> int:
        return self.length

    def _read_episode(self, index: int, names: Sequence[str] | None) -> ColumnTable:
        rng = np.random.default_rng(index)
        state = np.cumsum(rng.normal(0, 0.02, (self.length, DIM)), axis=0)
        success = np.zeros(self.length)
        success[-1] = 1
        columns = {
            "observation.state": state,
            "action": state + rng.normal(0, 0.02, state.shape),
            "next.reward": success,
            "next.success": success,
        }
        kept = {name: x.astype(np.float32) for name, x in columns.items() if names is None or name in names}
        return ColumnTable(kept, np.array([0, self.length]), ("do it",), np.zeros(self.length, np.int32))

    def _read_frames(self, index: int, camera: str, ts: np.ndarray) -> np.ndarray:
        return self._noise[(ts + index) % len(self._noise)]

    def _check_camera(self, index: int, camera: str) -> None:
        pass


def make_config(assets_dir: str, cache_dir: str, batch_size: int, num_workers: int) -> RLTrainConfig:
    return RLTrainConfig(
        name="benchmark",
        batch_size=batch_size,
        model=Pi0Config(vocab_size=512, action_horizon=HORIZON),
        qchunking=QChunkingConfig(horizon_length=HORIZON, action_dim=DIM),
        data=DataConfig(
            asset_id="synthetic",
            robot=Aloha(adapt_to_pi=True),
            use_delta_joint_actions=True,
            repack=RepackConfig(base_0_rgb="top", left_wrist_0_rgb="left_wrist", right_wrist_0_rgb="right_wrist"),
            assets_dir=assets_dir,
            tokenizer="byte",
            frame_cache_dir=cache_dir,
            num_workers=num_workers,
        ),
    )


def measure_norm_stats(num_frames: int) -> tuple[float, float]:
    """Seconds of wall and CPU time for relative actions in pi units."""
    source = SyntheticSource(num_frames // 400, 400)
    table = source.read_columns(["observation.state", "action"])
    read = functools.partial(read_windows, table, make_config("", "", 1, 0))
    wall, cpu = time.perf_counter(), time.process_time()
    compute_norm_stats(int(table.offsets[-1]), read)
    return time.perf_counter() - wall, time.process_time() - cpu


@dataclasses.dataclass
class Throughput:
    per_cpu_second: float  # windows
    early_gib: float  # resident memory after a tenth of the windows
    final_gib: float


def measure_samples(config: RLTrainConfig, source: EpisodeSource, num_samples: int) -> Throughput:
    """Windows per CPU second in one thread, onto the first device, and what memory does meanwhile."""
    num_batches = max(10, num_samples // config.batch_size)
    with open_loader(config, source) as loader:
        for _ in range(2):
            jax.block_until_ready(loader.sample_batch())
        early = 0.0
        cpu = time.process_time()
        for i in range(num_batches):
            jax.block_until_ready(loader.sample_batch())
            if i == num_batches // 10:
                early = resident_gib()
        rate = num_batches * config.batch_size / (time.process_time() - cpu)
        return Throughput(rate, early, resident_gib())


def resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


@dataclasses.dataclass
class Waits:
    share: float  # of the wall time
    longest: float  # seconds
    cpu_share: float  # CPU seconds per wall second


def measure_waits(config: RLTrainConfig, source: EpisodeSource, num_batches: int, step_seconds: float) -> Waits:
    """How long a loop that does nothing but sleep for a train step waits for its batches."""
    with open_loader(config, source) as loader:
        run_steps(loader, 4, step_seconds)
        start, cpu = time.perf_counter(), time.process_time()
        waits = run_steps(loader, num_batches, step_seconds)
        total = time.perf_counter() - start
        return Waits(sum(waits) / total, max(waits), (time.process_time() - cpu) / total)


def run_steps(loader: DataLoader, num_batches: int, step_seconds: float) -> list[float]:
    waits = []
    for _ in range(num_batches):
        start = time.perf_counter()
        jax.block_until_ready(loader.sample_batch())
        waits.append(time.perf_counter() - start)
        time.sleep(step_seconds)
    return waits


def open_loader(config: RLTrainConfig, source: EpisodeSource) -> DataLoader:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return DataLoader(open_dataset(config, source), config, batch_size=config.batch_size, device_sharding=device)


def describe_machine() -> str:
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        revision = commit.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    return (
        f"{datetime.date.today()}, commit {revision}, {os.cpu_count()} cores {platform.machine()}, "
        f"Python {platform.python_version()}, jax {jax.__version__} on {jax.devices()[0].device_kind}, "
        f"load average before the run {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--num_batches", type=int, default=60)
    parser.add_argument("--num_samples", type=int, default=100_000)
    parser.add_argument("--step_ms", type=float, default=300.0)
    parser.add_argument("--stats_frames", type=int, default=100_000)
    parser.add_argument("--episodes", type=int, default=20, help="of 200 steps in the cache: 90 MB each")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--directory", default=None, help="where the cache goes; a temporary directory by default")
    args = parser.parse_args()

    machine = describe_machine()
    stats_wall, stats_cpu = measure_norm_stats(args.stats_frames)
    source = SyntheticSource(args.episodes, 200)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        cache = f"{folder}/cache"
        build_frame_cache(source, Path(cache), height=SIZE, width=SIZE)
        config = make_config(f"{folder}/assets", cache, args.batch_size, args.num_workers)
        write_norm_stats(config, source)
        in_one_thread = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=0))
        samples = measure_samples(in_one_thread, source, args.num_samples)
        waits = measure_waits(config, source, args.num_batches, args.step_ms / 1000)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    print(f"# Data loading\n\n{machine}.\n")
    print("| what | measured | wanted |\n|---|---|---|")
    print(
        f"| norm statistics of {args.stats_frames:,} frames x {HORIZON} x {DIM} | {stats_wall:.2f} s wall, "
        f"{stats_cpu:.2f} s CPU | under 5 s |"
    )
    print(
        f"| samples per CPU second from a warm cache, to the device | {samples.per_cpu_second:,.0f} | at least 2,500 |"
    )
    print(
        f"| resident memory after {args.num_samples // 10:,} and {args.num_samples:,} samples "
        f"| {samples.early_gib:.2f} and {samples.final_gib:.2f} GiB | equal |"
    )
    print(
        f"| data wait of a {args.step_ms:.0f} ms step, batch {args.batch_size}, 3 cameras, {args.num_workers} workers "
        f"| {100 * waits.share:.2f} % (longest {1000 * waits.longest:.0f} ms) | under 2 % |"
    )
    print(f"| CPU the loader takes during that | {waits.cpu_share:.2f} cores | |")
    print(f"| peak resident memory of the process | {resident:.1f} GiB | |")


if __name__ == "__main__":
    main()
