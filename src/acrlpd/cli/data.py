"""The commands of `acrlpd data`: typed functions whose signatures become the command line.

A command imports its work when it runs, so that help does not wait for the import.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.text import Text

from acrlpd.console import Console
from acrlpd.text import print

Dataset = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET", help="Directory or hub id.")]
JsonFlag = Annotated[bool, tyro.conf.arg(name="json", help="Print JSON."), tyro.conf.FlagCreatePairsOff]
OnBadEpisode = Annotated[
    Literal["error", "skip"], tyro.conf.arg(help="Stop at a broken episode, or leave the episode out and list it.")
]


def inspect(
    dataset: Dataset,
    contact_sheet: Path | None = None,
    on_bad_episode: OnBadEpisode = "skip",
    json_: JsonFlag = False,
) -> None:
    """Show what a dataset holds: episodes, features, success, rewards, action ranges, and warnings.

    Args:
        contact_sheet: PNG file to write, with first, middle and last frames of some episodes.
    """
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.inspect import contact_sheet as make_contact_sheet
    from acrlpd.data.tools.inspect import inspect_source, print_report

    source = open_source(dataset, on_bad_episode=on_bad_episode)
    report = inspect_source(source)
    if json_:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print_report(report, Console())
    if contact_sheet is not None:
        make_contact_sheet(source).save(contact_sheet)


def stats(args: Sequence[str]) -> int:
    """Compute the norm statistics of a config's dataset, from its columns alone."""
    from acrlpd.cli import data_stats

    return data_stats.main(args)


def fast_tokenizer(args: Sequence[str]) -> int:
    """Fit a tokenizer for the actions of a config's dataset, which pi0-FAST needs."""
    from acrlpd.cli import data_fast_tokenizer

    return data_fast_tokenizer.main(args)


def cache(
    dataset: Dataset,
    cache_dir: Annotated[Path, tyro.conf.Positional],
    height: int = 224,
    width: int = 224,
    cameras: tuple[str, ...] | None = None,
    format: Literal["raw", "jpeg"] = "raw",
    workers: int | None = None,
    on_bad_episode: OnBadEpisode = "error",
) -> None:
    """Decode all frames once, at the model's resolution; run it again to go on after an interruption.

    Args:
        cache_dir: Directory of the cache, empty or with the begun cache of this dataset.
        height: Height of the model's images.
        width: Width of the model's images.
        cameras: Cameras to keep; all by default.
        format: Raw is fastest; jpeg is about seven times smaller.
        workers: Threads; one per core by default.
    """
    from acrlpd.data.frames.cache_builder import build_frame_cache
    from acrlpd.data.sources.source import open_source

    source = open_source(dataset, on_bad_episode=on_bad_episode)
    skipped = build_frame_cache(
        source, cache_dir, height=height, width=width, cameras=cameras, encoding=format, workers=workers
    )
    reasons = [*(episode.reason for episode in source.skipped), *skipped.values()]
    _print_summary(f"{cache_dir}: {len(source) - len(skipped)} episodes, {len(reasons)} skipped", reasons)


def label(
    dataset: Dataset,
    success: str = "",
    failure: str = "",
    reward: str = "",
    rule: str | None = None,
    interactive: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    camera: str | None = None,
    labels_file: Path | None = None,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    on_bad_episode: OnBadEpisode = "error",
) -> None:
    """Write down which episodes succeeded, in a file next to the dataset.

    Args:
        success: Episodes that succeeded, for example 0-9,12.
        failure: Episodes that failed.
        reward: Reward of the last step of labelled episodes, for example 0-4=0.5,7=2, instead of the usual.
        rule: Success where it holds, for example "sum(next.reward) >= 1" or "length < 300".
        interactive: Show first and last frame of each episode without a label, and ask.
        camera: The camera to show; the first by default.
        labels_file: Where to write; `<dataset>.labels.json` by default.
        overwrite: Change labels that episodes have already.
    """
    from acrlpd.data.pipeline.labels import Labels, labels_path, load_labels
    from acrlpd.data.sources.source import DatasetError, open_source
    from acrlpd.data.tools import label as tools

    source = open_source(dataset, on_bad_episode=on_bad_episode)
    if not (success or failure or reward or rule or interactive):
        raise DatasetError("say how to label: --success, --failure, --reward, --rule or --interactive")
    path = labels_file or labels_path(source.root)
    before = labels = load_labels(path, source) or Labels(path, {})
    if rule:
        labels = labels.updated(tools.label_rule(source, rule))
    labels = labels.updated(tools.label_list(source, tools.parse_indices(success), tools.parse_indices(failure)))
    labels = labels.updated(tools.label_rewards(labels.episodes, tools.parse_rewards(reward)))
    if not overwrite:
        tools.require_kept(before, labels)
    shown = camera or (source.cameras[0] if source.cameras else None)
    if interactive and (shown is None or shown not in source.cameras):
        raise DatasetError(f"{source.root}: no camera {shown!r}; it has {list(source.cameras)}")
    if labels.episodes:  # a file without labels would hide the dataset's own rewards
        labels.save()
    console = Console()
    if interactive and shown is not None:
        for index, answer in tools.label_interactively(source, labels.episodes, shown, console):
            labels = labels.updated({index: answer})
            labels.save()
    outcomes = labels.outcomes(source)
    labelled = outcomes.successes + outcomes.failures
    console.print(f"{path}: {labelled} of {len(source)} episodes labelled ({outcomes})")
    if outcomes.successes and outcomes.failures:
        console.print(
            "A failure is the end of a recording for the critics. To make it an end of the task, with a reward of its "
            "own, set data.rewards.failure_reward, for example to -100 (docs/data_batches.md)"
        )


def convert(
    dataset: Dataset,
    output: Annotated[Path, tyro.conf.Positional],
    task: str | None = None,
    robot_type: str | None = None,
    codec: Literal["libsvtav1", "h264"] = "libsvtav1",
    on_bad_episode: OnBadEpisode = "error",
) -> None:
    """Convert ALOHA or DROID HDF5 episodes to a LeRobot v3.0 dataset, in bounded memory.

    Args:
        output: Directory of the new dataset.
        task: What the robot does, for episodes that do not say it themselves.
        robot_type: Name of the robot in the new dataset.
        codec: AV1 as lerobot writes it, or H.264, which encodes faster.
    """
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.convert import convert_to_lerobot

    source = open_source(dataset, on_bad_episode=on_bad_episode)
    skipped = convert_to_lerobot(source, output, task=task, codec=codec, robot_type=robot_type)
    reasons = [episode.reason for episode in skipped]
    _print_summary(f"{output}: {len(open_source(output))} episodes, {len(reasons)} skipped", reasons)


def ogbench(
    env: str,
    output: Path,
    import_: Annotated[Path | None, tyro.conf.arg(name="import")] = None,
    episodes: int | None = None,
    episode_steps: int = 1001,
    seed: int = 0,
    num_workers: int | None = None,
) -> None:
    """Make a play dataset of OGBench with the rewards of its five tasks. A command that was interrupted continues.

    Args:
        env: cube-single, cube-double, cube-triple, cube-quadruple, scene, puzzle-3x3 or puzzle-4x4.
        output: Directory of the new dataset, which gets the datasets train and validation.
        import_: OGBench's own file, such as cube-double-play-v0.npz, with cube-double-play-v0-val.npz beside it.
            Default: play with OGBench's oracles.
        episodes: Training episodes; a tenth as many are added for validation. Default: as many as OGBench has.
        episode_steps: Steps of an episode.
        seed: Seed of everything random.
        num_workers: Processes that play; 0 means this process. Default: one per core.
    """
    from acrlpd.experts.ogbench_datasets import PlaySettings, generate_play, import_play, ogbench_episodes

    if import_ is None:
        num_episodes = ogbench_episodes(env) if episodes is None else episodes
        generate_play(PlaySettings(env, num_episodes, episode_steps, seed), output, num_workers=num_workers)
    elif (episodes, episode_steps, seed, num_workers) != (None, 1001, 0, None):
        raise ValueError("leave out --episodes, --episode-steps, --seed and --num-workers: --import plays no episodes")
    else:
        import_play(env, import_, output)
    Console().print(f"{output}: complete, with the datasets train and validation")


def validate(
    dataset: Dataset,
    cache_dir: Path | None = None,
    frames: Literal["none", "ends", "all"] = "ends",
    json_: JsonFlag = False,
) -> int:
    """Check every episode, and list all that is wrong; exit code 1 if anything is. Says what was not looked at.

    Args:
        cache_dir: A frame cache of the dataset whose checksums to check as well.
        frames: Which frames to decode: none, the first and last of every episode and camera, or all. All also compares
            the columns with the statistics that a LeRobot dataset records.
    """
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.inspect import NOT_LOOKED_AT, validate_cache, validate_source

    source = open_source(dataset)
    problems = validate_source(source, frames=frames)
    if cache_dir is not None:
        problems += validate_cache(cache_dir, source)
    if json_:
        found = {"episodes": len(source), "problems": problems, "not_looked_at": NOT_LOOKED_AT[frames]}
        print(json.dumps(found, indent=2))
    else:
        _print_summary(f"{dataset}: {len(source)} episodes, {len(problems)} problems", problems, ("broken", "red"))
        Console().print(f"not looked at: {NOT_LOOKED_AT[frames]}")
    return 1 if problems else 0


def _print_summary(summary: str, reasons: list[str], word: tuple[str, str] = ("skipped", "yellow")) -> None:
    """Prints a line for every episode that is skipped or broken, and a last line. `word` has its style with it."""
    console = Console()
    for reason in reasons:
        console.print(Text.assemble(word, f" {reason}"))
    console.print(summary)


COMMANDS = {
    command.__name__: command for command in (inspect, stats, fast_tokenizer, cache, label, convert, ogbench, validate)
}
# Commands that read their arguments themselves, because every field of a config is a flag of theirs.
CONFIG_COMMANDS = ("stats", "fast_tokenizer")
