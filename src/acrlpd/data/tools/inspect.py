"""What a dataset holds and what is or may go wrong with it, before anything is trained on it."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rich.box
import rich.progress
from PIL import Image, ImageDraw
from rich.table import Table
from rich.text import Text

from acrlpd.config import RewardConfig
from acrlpd.console import Console
from acrlpd.data.frames.store import FrameCache, read_manifest, resize_with_pad
from acrlpd.data.pipeline.labels import Outcomes, labels_path, load_labels
from acrlpd.data.pipeline.rewards import read_rewards
from acrlpd.data.sources.source import DatasetError, EpisodeSource, SkippedEpisode, check_episodes
from acrlpd.data.tools.lerobot_writer import Stats, column_stats

# A dimension whose middle 98 % spans less than this (radians, metres) blows up when it is normalised.
NEAR_CONSTANT = 1e-3
# The whole range may be this many times the middle 98 % before outliers are suspected.
_OUTLIER_RATIO = 20.0
_SHORT_EPISODE = 10
_HISTOGRAM_BINS = 10
_THUMBNAIL = (120, 160)
_SHEET_EPISODES = 8
# Which frames validation decodes: none (file headers only), the first and last of each clip, or all.
Frames = Literal["none", "ends", "all"]
_STATISTICS = "whether values have the statistics that the dataset records; --frames all looks at both"
# What validation does not look at, in words.
NOT_LOOKED_AT: dict[Frames, str] = {
    "none": f"the frames, and {_STATISTICS}",
    "ends": f"the frames between the first and the last of each episode and camera, and {_STATISTICS}",
    "all": "nothing; but a file without checksums can hide flipped bits (docs/data.md has the numbers for each format)",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything `acrlpd data inspect` shows, as plain data."""

    path: str
    format: str
    identity: str
    fps: float
    episodes: int
    frames: int
    lengths: dict[str, float]  # min, median, mean, max
    features: dict[str, dict[str, Any]]  # name -> dtype, shape
    cameras: list[str]
    prompts: dict[str, int]  # prompt -> steps
    success_rate: float | None
    outcomes: dict[str, int] | None  # episodes that are successes, failures, neither; None: nothing is known
    rewards_from: str | None
    reward_histogram: list[tuple[float, float, int]]  # (from, to, steps)
    ranges: dict[str, Stats]  # of every column of vectors: statistic -> a number per dim
    warnings: list[str]
    skipped: list[SkippedEpisode]


def inspect_source(source: EpisodeSource) -> Report:
    """Reads all low-dimensional columns of a source, and no frame."""
    source.require_episodes()
    table = source.read_columns()
    lengths = np.diff(table.offsets)
    rewards, no_rewards, outcomes = None, "", None
    try:
        labels = load_labels(labels_path(source.root), source)
        outcomes = None if labels is None else labels.outcomes(source)
        rewards = read_rewards(source, table, RewardConfig())
        outcomes = rewards.outcomes
    except DatasetError as error:
        no_rewards = str(error)
    vectors = {name: x for name, x in table.columns.items() if x.ndim == 2 and np.issubdtype(x.dtype, np.floating)}
    ranges = {name: column_stats(values) for name, values in vectors.items()}
    steps = Counter(table.prompts[i] for i in table.prompt_index.tolist())
    warnings = [*_length_warnings(source, lengths), *_range_warnings(ranges)]
    if rewards is None:
        warnings.append(no_rewards)
    elif rewards.success.all():
        warnings.append("every episode is a success: the critic sees no failure to learn from")
    elif not rewards.success.any():
        warnings.append("no episode is a success: there is nothing to learn from")
    if None in steps:
        warnings.append(f"{steps[None]} steps have no prompt: set data.default_prompt")
    return Report(
        path=str(source.root),
        format=source.format,
        identity=source.identity,
        fps=source.fps,
        episodes=len(source),
        frames=int(lengths.sum()),
        lengths={
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        },
        features={n: {"dtype": f.dtype, "shape": list(f.shape)} for n, f in source.features.items()},
        cameras=list(source.cameras),
        prompts={prompt: count for prompt, count in steps.most_common() if prompt is not None},
        success_rate=None if rewards is None else float(rewards.success.mean()),
        outcomes=None if outcomes is None else outcomes._asdict(),
        rewards_from=None if rewards is None else rewards.origin.describe(RewardConfig()),
        reward_histogram=[] if rewards is None else _histogram(rewards.rewards),
        ranges=ranges,
        warnings=warnings,
        skipped=list(source.skipped),
    )


def _range_warnings(ranges: dict[str, Stats]) -> list[str]:
    warnings = []
    for name, stats in ranges.items():
        whole, middle = np.subtract(stats["max"], stats["min"]), np.subtract(stats["q99"], stats["q01"])
        constant = np.flatnonzero(middle < NEAR_CONSTANT)
        if constant.size:
            warnings.append(
                f"{name}: dims {constant.tolist()} are (nearly) constant: 98 % of values lie within "
                f"{NEAR_CONSTANT:g}; normalising divides by almost nothing there"
            )
        wild = np.flatnonzero((whole > _OUTLIER_RATIO * middle) & (middle >= NEAR_CONSTANT))
        if wild.size:
            warnings.append(
                f"{name}: dims {wild.tolist()} have outliers: the range is over {_OUTLIER_RATIO:g} times "
                "what 98 % of values use"
            )
    return warnings


def _length_warnings(source: EpisodeSource, lengths: np.ndarray) -> list[str]:
    warnings = [] if source.cameras else ["no cameras: only a state policy can be trained"]
    short = [source.indices[i] for i in np.flatnonzero(lengths < _SHORT_EPISODE)]
    if short:
        warnings.append(f"{len(short)} episodes have fewer than {_SHORT_EPISODE} steps: {short[:10]}")
    if not source.skipped and source.indices != tuple(range(len(source))):
        warnings.append(f"episode numbers have gaps: {len(source)} episodes up to number {source.indices[-1]}")
    if source.skipped:
        warnings.append(f"{len(source.skipped)} broken episodes were skipped")
    return warnings


def _histogram(rewards: np.ndarray) -> list[tuple[float, float, int]]:
    """Steps per distinct reward if there are few distinct rewards, otherwise steps per bin."""
    values, counts = np.unique(rewards, return_counts=True)
    if len(values) <= _HISTOGRAM_BINS:
        return [(float(v), float(v), int(n)) for v, n in zip(values, counts, strict=True)]
    counts, edges = np.histogram(rewards, _HISTOGRAM_BINS)
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def print_report(report: Report, console: Console) -> None:
    seconds = report.frames / report.fps
    console.print(Text.assemble((report.path, "bold"), f": {report.format}"))
    console.print(
        f"{report.episodes} episodes, {report.frames} steps at {report.fps:g} fps ({seconds / 3600:.2f} h); "
        f"length {report.lengths['min']} / {report.lengths['median']:g} / {report.lengths['max']} "
        "(shortest / median / longest)"
    )
    features = Table("feature", "dtype", "shape", box=rich.box.SIMPLE)
    for name, feature in report.features.items():
        features.add_row(name, feature["dtype"], str(feature["shape"]))
    console.print(features)
    for prompt, count in list(report.prompts.items())[:10]:
        console.print(f"prompt {prompt!r}: {count} steps")
    if report.outcomes is not None:
        console.print(f"{Outcomes(**report.outcomes)}")
    if report.success_rate is not None:
        console.print(f"success rate {report.success_rate:.1%} ({report.rewards_from})")
        for low, high, count in report.reward_histogram:
            console.print(f"  reward {low:g}{'' if low == high else f' to {high:g}'}: {count} steps")
    shown = ("min", "q01", "mean", "q99", "max", "std")
    for name, stats in report.ranges.items():
        table = Table("dim", *shown, title=name, box=rich.box.SIMPLE)
        for dim, numbers in enumerate(zip(*(stats[statistic] for statistic in shown), strict=True)):
            table.add_row(str(dim), *(f"{number:.4g}" for number in numbers))
        console.print(table)
    for skipped in report.skipped:
        console.print(Text.assemble(("skipped", "yellow"), f" {skipped.reason}"))
    for warning in report.warnings:
        console.print(Text.assemble(("warning", "yellow"), f" {warning}"))


def contact_sheet(source: EpisodeSource) -> Image.Image:
    """First, middle and last frame of every camera, for up to eight episodes spread over the dataset."""
    if not source.cameras:
        raise DatasetError(f"{source.root}: has no cameras to show")
    chosen = np.unique(np.linspace(0, len(source) - 1, _SHEET_EPISODES).astype(int)).tolist()
    height, width = _THUMBNAIL
    margin = 14  # for a line of text above each row
    sheet = Image.new("RGB", (3 * len(source.cameras) * width, len(chosen) * (height + margin)))
    draw = ImageDraw.Draw(sheet)
    for row, i in enumerate(chosen):
        episode = source.episode(i)
        top = row * (height + margin)
        draw.text((2, top + 1), f"episode {episode.index}, {episode.length} steps: {episode.prompt or ''}")
        steps = [0, episode.length // 2, episode.length - 1]
        for c, camera in enumerate(source.cameras):
            for k, thumbnail in enumerate(resize_with_pad(episode.frames(camera, steps), height, width)):
                sheet.paste(Image.fromarray(thumbnail), ((3 * c + k) * width, top + margin))
    return sheet


def validate_source(source: EpisodeSource, *, frames: Frames = "ends") -> list[str]:
    """Reads every column, every file header and the chosen frames; returns a line per broken episode."""

    def check_ends(index: int) -> None:
        length = source.check(index)
        for camera in source.cameras:
            source.read_frames(index, camera, np.unique([0, length - 1]))

    check: Callable[[int], object] = {"none": source.check, "ends": check_ends, "all": source.verify}[frames]
    results = rich.progress.track(
        check_episodes(source, check), "checking episodes", total=len(source), console=Console(stderr=True)
    )
    return [problem for _, problem in results if problem]


def validate_cache(directory: Path, source: EpisodeSource) -> list[str]:
    """Compares a frame cache with its dataset and every shard with its checksum."""
    try:
        spec, _, _ = read_manifest(directory)
        cache = FrameCache(directory, source, spec.cameras, spec.height, spec.width)
    except DatasetError as error:
        return [str(error)]
    problems = cache.verify()
    cache.close()
    return problems
