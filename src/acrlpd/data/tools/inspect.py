"""What a dataset holds and what may go wrong with it, before anything is trained on it."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import rich.box
from PIL import Image, ImageDraw
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from acrlpd.config import RewardConfig
from acrlpd.data.frames.resize import resize_with_pad
from acrlpd.data.pipeline.rewards import (
    StepRewards,
    compute_rewards,
    labels_path,
    load_labels,
    require_success_in_time,
)
from acrlpd.data.sources.source import ColumnTable, DatasetError, EpisodeSource, SkippedEpisode

# A dimension whose middle 98 % spans less than this (radians, metres) blows up when it is normalised.
NEAR_CONSTANT = 1e-3
# The whole range may be this many times the middle 98 % before outliers are suspected.
_OUTLIER_RATIO = 20.0
_SHORT_EPISODE = 10
_HISTOGRAM_BINS = 10
_THUMBNAIL = (120, 160)
_SHEET_EPISODES = 8


@dataclasses.dataclass(frozen=True)
class ColumnRange:
    """How the values of one column spread over the whole dataset; one number per dimension."""

    min: list[float]
    q01: list[float]
    mean: list[float]
    q99: list[float]
    max: list[float]
    std: list[float]


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
    rewards_from: str | None
    reward_histogram: list[tuple[float, float, int]]  # (from, to, steps)
    ranges: dict[str, ColumnRange]  # of the state and action columns
    warnings: list[str]
    skipped: list[SkippedEpisode]


def inspect_source(source: EpisodeSource) -> Report:
    """Reads all low-dimensional columns of a source, and no frame."""
    if not len(source):
        raise DatasetError(f"{source.root} has no usable episodes{source.why_skipped()}")
    table = source.read_columns()
    lengths = np.diff(table.offsets)
    rewards, no_rewards = _rewards(source, table)
    ranges = {name: _range(v) for name, v in table.columns.items() if _is_vector(v)}
    steps = Counter(table.prompts[i] for i in table.prompt_index.tolist())
    warnings = [*_length_warnings(source, lengths), *_range_warnings(ranges)]
    warnings += [no_rewards] if no_rewards else _success_warnings(rewards)
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
        rewards_from=None if rewards is None else rewards.origin.describe(RewardConfig()),
        reward_histogram=[] if rewards is None else _histogram(rewards.rewards),
        ranges=ranges,
        warnings=warnings,
        skipped=list(source.skipped),
    )


def _rewards(source: EpisodeSource, table: ColumnTable) -> tuple[StepRewards | None, str | None]:
    """Rewards as a run with the default reward config would see them, or the reason why there are no rewards."""
    try:
        labels = load_labels(labels_path(source.root), source)
        config = RewardConfig()
        rewards = compute_rewards(table, source.indices, config, labels)
        require_success_in_time(table, rewards, config)
    except DatasetError as error:
        return None, str(error)
    return rewards, None


def _is_vector(values: np.ndarray) -> bool:
    return values.ndim == 2 and np.issubdtype(values.dtype, np.floating)


def _range(values: np.ndarray) -> ColumnRange:
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    return ColumnRange(
        min=values.min(axis=0).tolist(),
        q01=low.tolist(),
        mean=values.mean(axis=0, dtype=np.float64).tolist(),
        q99=high.tolist(),
        max=values.max(axis=0).tolist(),
        std=values.std(axis=0, dtype=np.float64).tolist(),
    )


def _range_warnings(ranges: dict[str, ColumnRange]) -> list[str]:
    warnings = []
    for name, r in ranges.items():
        whole, middle = np.subtract(r.max, r.min), np.subtract(r.q99, r.q01)
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


def _success_warnings(rewards: StepRewards | None) -> list[str]:
    assert rewards is not None
    if rewards.success.all():
        return ["every episode is a success: the critic sees no failure to learn from"]
    if not rewards.success.any():
        return ["no episode is a success: there is nothing to learn from"]
    return []


def _histogram(rewards: np.ndarray) -> list[tuple[float, float, int]]:
    """Steps per distinct reward if there are few distinct rewards, otherwise steps per bin."""
    values, counts = np.unique(rewards, return_counts=True)
    if len(values) <= _HISTOGRAM_BINS:
        return [(float(v), float(v), int(n)) for v, n in zip(values, counts, strict=True)]
    counts, edges = np.histogram(rewards, _HISTOGRAM_BINS)
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def print_report(report: Report, console: Console) -> None:
    seconds = report.frames / report.fps
    console.print(f"[bold]{escape(report.path)}[/]: {escape(report.format)}")
    console.print(
        f"{report.episodes} episodes, {report.frames} steps at {report.fps:g} fps ({seconds / 3600:.2f} h); "
        f"length {report.lengths['min']} / {report.lengths['median']:g} / {report.lengths['max']} "
        "(shortest / median / longest)"
    )
    features = Table("feature", "dtype", "shape", box=rich.box.SIMPLE)
    for name, feature in report.features.items():
        features.add_row(*map(escape, (name, feature["dtype"], str(feature["shape"]))))
    console.print(features)
    for prompt, count in list(report.prompts.items())[:10]:
        console.print(f"prompt {prompt!r}: {count} steps", markup=False)
    if report.success_rate is not None:
        console.print(f"success rate {report.success_rate:.1%} ({report.rewards_from})", markup=False)
        for low, high, count in report.reward_histogram:
            console.print(f"  reward {low:g}{'' if low == high else f' to {high:g}'}: {count} steps")
    for name, r in report.ranges.items():
        console.print(_range_table(name, r))
    for skipped in report.skipped:
        console.print(f"[yellow]skipped[/] {escape(skipped.reason)}")
    for warning in report.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")


def _range_table(name: str, r: ColumnRange) -> Table:
    table = Table("dim", "min", "q01", "mean", "q99", "max", "std", title=escape(name), box=rich.box.SIMPLE)
    columns = (r.min, r.q01, r.mean, r.q99, r.max, r.std)
    for dim, numbers in enumerate(zip(*columns, strict=True)):
        table.add_row(str(dim), *(f"{number:.4g}" for number in numbers))
    return table


def contact_sheet(source: EpisodeSource) -> Image.Image:
    """First, middle and last frame of every camera, for up to eight episodes spread over the dataset."""
    if not source.cameras:
        raise DatasetError(f"{source.root}: has no cameras to show")
    chosen = np.unique(np.linspace(0, len(source) - 1, _SHEET_EPISODES).astype(int)).tolist()
    height, width = _THUMBNAIL
    margin = 14  # for a line of text above each row
    columns = 3 * len(source.cameras)
    sheet = Image.new("RGB", (columns * width, len(chosen) * (height + margin)))
    draw = ImageDraw.Draw(sheet)
    for row, i in enumerate(chosen):
        episode = source.episode(i)
        top = row * (height + margin)
        draw.text((2, top + 1), f"episode {episode.index}, {episode.length} steps: {episode.prompt or ''}")
        steps = [0, episode.length // 2, episode.length - 1]
        for c, camera in enumerate(source.cameras):
            thumbnails = resize_with_pad(episode.frames(camera, steps), height, width)
            for k, thumbnail in enumerate(thumbnails):
                sheet.paste(Image.fromarray(thumbnail), ((3 * c + k) * width, top + margin))
    return sheet
