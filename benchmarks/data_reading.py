"""How fast episodes are read: without a cache, with one, opening, and memory. Prints a Markdown table.

A sample is what one training window needs: 3 cameras at t and at t + 50, the state at t and 50 actions.
Rates are per CPU second (all threads), which other processes on the machine disturb least.

    python benchmarks/data_reading.py            # a few minutes, most of it encoding the dataset
    python benchmarks/data_reading.py --smoke    # half a minute, numbers mean little
    python benchmarks/data_reading.py --lerobot-python ~/lerobot/bin/python    # LeRobotDataset on the same files
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.frames.decoded import open_frame_store
from acrlpd.data.frames.store import Encoding, FrameStore
from acrlpd.data.sources.source import ColumnTable, EpisodeSource, Feature, open_source
from acrlpd.data.tools.lerobot_writer import LeRobotWriter

HORIZON = 50
HEIGHT, WIDTH = 480, 640
CAMERAS = tuple(f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist"))
SIZE = 224  # of the model's images
MANY_EPISODES = 10_000

Row = tuple[str, str, str]  # what, measured, goal


def frame(rng_texture: np.ndarray, t: int, episode: int) -> np.ndarray:
    """A textured scene with a moving gradient and a moving block, as hard to encode as a tidy table top."""
    image = rng_texture.copy()
    half = HEIGHT // 2
    image[half:, :, 0] = 0.6 * image[half:, :, 0] + 0.4 * ((np.arange(WIDTH) + 3 * t) % 256)
    size = HEIGHT // 8
    x = int((WIDTH - size) * (0.5 + 0.5 * np.sin(t / 15 + episode)))
    y = half + int((half - size) * (0.5 + 0.5 * np.cos(t / 11 + episode)))
    image[y : y + size, x : x + size] = (230, 40, 40)
    return image.astype(np.uint8)


def write_dataset(root: Path, episodes: int, length: int) -> None:
    features = {camera: Feature("video", (HEIGHT, WIDTH, 3)) for camera in CAMERAS}
    features |= {"observation.state": Feature("float32", (14,)), "action": Feature("float32", (14,))}
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=50, features=features, robot_type="aloha") as writer:
        for episode in range(episodes):
            coarse = rng.integers(40, 200, (len(CAMERAS), HEIGHT // 16, WIDTH // 16, 3)).astype(np.float32)
            textures = coarse.repeat(16, axis=1).repeat(16, axis=2)
            numbers = rng.normal(size=(length, 2, 14)).astype(np.float32)
            for t in range(length):
                frames = {c: frame(textures[k], t, episode + k) for k, c in enumerate(CAMERAS)}
                writer.add_step({"observation.state": numbers[t, 0], "action": numbers[t, 1]}, frames)
            writer.end_episode("transfer the cube")


def write_many_v3(root: Path, like: Path) -> None:
    """Metadata of 10,000 episodes with all columns that lerobot writes; opening needs no more."""
    table = pq.read_table(like / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    rows = table.take(np.arange(MANY_EPISODES) % len(table))
    length = rows["length"].to_numpy()
    ends = np.cumsum(length)
    numbers = {"episode_index": np.arange(MANY_EPISODES), "dataset_from_index": ends - length}
    for name, values in numbers.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values))
    target = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    target.parent.mkdir(parents=True)
    pq.write_table(rows, target, row_group_size=250)
    shutil.copy(like / "meta" / "tasks.parquet", root / "meta")
    info = json.loads((like / "meta" / "info.json").read_text())
    (root / "meta" / "info.json").write_text(json.dumps(info | {"total_episodes": MANY_EPISODES}))


def write_many_v2(root: Path, like: Path) -> None:
    """The same in v2.1, where an episode is a line."""
    (root / "meta").mkdir(parents=True)
    info = json.loads((like / "meta" / "info.json").read_text())
    info |= {"codebase_version": "v2.1", "total_episodes": MANY_EPISODES}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    (root / "meta" / "info.json").write_text(json.dumps(info))
    lines = [{"episode_index": i, "tasks": ["transfer the cube"], "length": 300} for i in range(MANY_EPISODES)]
    (root / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "meta" / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "transfer the cube"}))


def draw(table: ColumnTable, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(table.offsets)
    episodes = rng.integers(0, len(lengths), count)
    return episodes, rng.integers(0, lengths[episodes] - HORIZON)


def per_cpu_second(work: Callable[[], int]) -> float:
    start = time.process_time()
    samples = work()
    return samples / (time.process_time() - start)


def read_direct(source: EpisodeSource, table: ColumnTable, samples: int) -> int:
    """Full-size frames, nothing resized: what LeRobotDataset gives too."""
    episodes, steps = draw(table, np.random.default_rng(1), samples)
    for episode, t in zip(episodes.tolist(), steps.tolist(), strict=True):
        row = table.offsets[episode] + t
        table.columns["observation.state"][row].copy()
        table.columns["action"][row : row + HORIZON].copy()
        for camera in CAMERAS:
            source.read_frames(source.indices[episode], camera, np.array([t, t + HORIZON]))
    return samples


def read_store(store: FrameStore, table: ColumnTable, samples: int, batch: int = 64) -> int:
    """Frames at the model's size in batches, into buffers that are used again."""
    rng = np.random.default_rng(2)
    out = {camera: np.zeros((2 * batch, store.height, store.width, 3), np.uint8) for camera in CAMERAS}
    ahead = np.arange(HORIZON)
    for _ in range(samples // batch):
        episodes, steps = draw(table, rng, batch)
        rows = table.offsets[episodes] + steps
        table.columns["observation.state"][rows]
        table.columns["action"][rows[:, None] + ahead]
        for camera in CAMERAS:
            both = np.concatenate([steps, steps + HORIZON])
            store.read_into(camera, np.tile(episodes, 2), both, out[camera])
    return samples // batch * batch


def resident_mb(field: str = "VmRSS") -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def growth_mb(work: Callable[[], int]) -> float:
    """How much resident memory grows, after a warm-up."""
    work()
    before = resident_mb()
    work()
    return resident_mb() - before


def seconds_to_open(root: Path) -> float:
    start = time.perf_counter()
    source = open_source(root)
    assert source.lengths.sum() > 0
    return time.perf_counter() - start


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def lerobot_rate(python: Path, root: Path, samples: int) -> float:
    """Samples per CPU second of LeRobotDataset, in an interpreter of its own."""
    script = Path(__file__).with_name("lerobot_reading.py")
    command = [str(python), str(script), str(root), str(samples)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure_decoding(
    source: EpisodeSource, table: ColumnTable, samples: int, lerobot_python: Path | None
) -> Iterator[Row]:
    read_direct(source, table, 8)
    rate = per_cpu_second(lambda: read_direct(source, table, samples))
    yield "decoding, full size, samples per CPU s", f"{rate:.0f}", "55 (2.5 x LeRobotDataset's 22)"
    if lerobot_python is not None:
        theirs = lerobot_rate(lerobot_python, source.root, samples)
        yield "LeRobotDataset, the same samples, per CPU s", f"{theirs:.0f}", ""
        yield "decoding against LeRobotDataset", f"{rate / theirs:.1f} x", "2.5 x"
    direct = open_frame_store(source, height=SIZE, width=SIZE)
    rate = per_cpu_second(lambda: read_store(direct, table, samples))
    yield f"decoding, resized to {SIZE}x{SIZE}, samples per CPU s", f"{rate:.0f}", ""
    grown = growth_mb(lambda: read_store(direct, table, samples))
    yield f"decoding, memory growth over {samples} samples", f"{grown:.0f} MB", "0"


def measure_cache(
    source: EpisodeSource, table: ColumnTable, directory: Path, encoding: Encoding, samples: int
) -> Iterator[Row]:
    frames = int(source.lengths.sum()) * len(CAMERAS)

    def build() -> int:
        build_frame_cache(source, directory, height=SIZE, width=SIZE, encoding=encoding)
        return frames

    yield f"building the {encoding} cache, frames per CPU s", f"{per_cpu_second(build):.0f}", ""
    cache = open_frame_store(source, height=SIZE, width=SIZE, cache_dir=directory)
    read_store(cache, table, min(samples, 2000))
    before = resident_mb()
    rate = per_cpu_second(lambda: read_store(cache, table, samples))
    yield f"{encoding} cache, warm, samples per CPU s", f"{rate:.0f}", "2500" if encoding == "raw" else ""
    yield f"{encoding} cache, memory growth over {samples} samples", f"{resident_mb() - before:.0f} MB", "0"
    cache.close()
    shutil.rmtree(directory)


def measure_opening(work: Path, dataset: Path) -> Iterator[Row]:
    for version, write in (("v3.0", write_many_v3), ("v2.1", write_many_v2)):
        root = work / f"many-{version}"
        shutil.rmtree(root, ignore_errors=True)
        write(root, dataset)
        yield f"opening {MANY_EPISODES} episodes, {version}", f"{seconds_to_open(root):.2f} s", "2 s"
        shutil.rmtree(root)


def measure(work: Path, args: argparse.Namespace) -> Iterator[Row]:
    dataset = work / "dataset"
    if not (dataset / "meta" / "info.json").is_file():
        shutil.rmtree(dataset, ignore_errors=True)
        write_dataset(dataset, args.episodes, args.length)
    source = open_source(dataset)
    table = source.read_columns(["observation.state", "action"])
    yield from measure_decoding(source, table, args.direct_samples, args.lerobot_python)
    caches: list[tuple[Encoding, int]] = [("raw", args.cache_samples), ("jpeg", args.cache_samples // 20)]
    for encoding, samples in caches:
        directory = work / f"cache-{encoding}"
        shutil.rmtree(directory, ignore_errors=True)
        yield from measure_cache(source, table, directory, encoding, samples)
    yield "peak resident memory of all of the above", f"{resident_mb('VmHWM'):.0f} MB", ""
    yield from measure_opening(work, dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small dataset and few samples")
    parser.add_argument("--work", type=Path, help="directory to keep the dataset in; a temporary one by default")
    parser.add_argument("--lerobot-python", type=Path, help="an interpreter with lerobot, to compare with")
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--direct-samples", type=int, default=640)
    parser.add_argument("--cache-samples", type=int, default=100_000)
    args = parser.parse_args()
    if args.smoke:
        args.episodes, args.length, args.direct_samples = 3, 70, 64
        args.cache_samples = 2560
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        results = list(measure(work, args))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"# Reading episodes, {datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}\n")
    print(f"{cpu_model()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end.")
    print(f"{args.episodes} episodes of {args.length} steps, 3 cameras {HEIGHT}x{WIDTH}, AV1, LeRobot v3.0.\n")
    print("| what | measured | goal |\n|---|---|---|")
    for row in results:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
