"""Whether the files of a run, of a checkpoint, of an export or of extracted parts are as they were written."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from acrlpd.checksums import directory_problems
from acrlpd.data.pipeline.replay import verify_replay
from acrlpd.files import read_json_object
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.runs.checkpoint_layout import (
    CRITIC,
    EXPORT_FILE,
    HUB_FILE,
    PARAMS,
    PARTS_FILE,
    RUN,
    RUN_FILE,
    TRAIN_STATE,
    CheckpointError,
    asset_problems,
    load_checkpoint_metadata,
    load_export_metadata,
    load_parts_metadata,
)
from acrlpd.runs.directory import CONFIG_FILE, saved_steps
from acrlpd.runs.parts import PART_DIRECTORIES
from acrlpd.runs.record import BASELINES, RunReader
from acrlpd.training.online.records import REPLAY, verify_rounds

Advance = Callable[[int], object]  # is called with the number of bytes that have been checked


@dataclasses.dataclass(frozen=True)
class Part:
    """Files that are checked together."""

    name: str  # relative to the directory that is checked
    num_bytes: int
    problems: Callable[[Advance], Iterator[str]]  # one text for each problem


def parts_to_verify(directory: Path) -> list[Part]:
    """Everything that can be checked in the directory of a run, of one of its checkpoints, or of an export."""
    directory = directory.expanduser().absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: expected a run, a checkpoint or an export")
    if (directory / EXPORT_FILE).is_file() or (directory / RUN / RUN_FILE).is_file():
        return list(_checkpoint_parts(directory, ""))
    if (directory / PARTS_FILE).is_file():
        return list(_extracted_parts(directory))
    if (directory / CONFIG_FILE).is_file() or saved_steps(directory):
        return list(_run_parts(directory, ""))
    if (directory / PARAMS).is_dir():
        raise CheckpointError(
            f"{directory} has neither {RUN}/{RUN_FILE} nor {EXPORT_FILE}: of a plain openpi checkpoint, which has no "
            "checksums, nothing can be verified"
        )
    raise CheckpointError(
        f"{directory} is neither a run ({CONFIG_FILE}, numbered checkpoints), nor a checkpoint ({RUN}/{RUN_FILE}), nor "
        f"an export ({EXPORT_FILE})"
    )


def _run_parts(directory: Path, prefix: str) -> Iterator[Part]:
    yield Part(f"{prefix}config and metrics", 0, lambda _: _record_problems(directory))
    for step in saved_steps(directory):
        yield from _checkpoint_parts(directory / str(step), f"{prefix}{step}/")
    replay = directory / REPLAY
    if replay.is_dir():
        yield Part(f"{prefix}{REPLAY}/ rounds", 0, lambda _: _round_problems(directory))
        yield Part(f"{prefix}{REPLAY}/ episodes", _size(replay), lambda _: verify_replay(replay))
    for baseline in sorted((directory / BASELINES).glob("*/")):
        yield from _run_parts(baseline, f"{prefix}{BASELINES}/{baseline.name}/")


def _record_problems(directory: Path) -> Iterator[str]:
    """What is wrong with config.yaml, metrics.jsonl and summary.json, which have no checksums."""
    try:
        yield from (f"{directory}: {problem}" for problem in RunReader(directory).read().problems)
    except ValueError as error:
        yield str(error)


def _round_problems(directory: Path) -> Iterator[str]:
    """What is wrong with the records of rounds, and which records are missing that a checkpoint has learned from."""
    replay = directory / REPLAY
    yield from verify_rounds(replay)
    num_records = len(list(replay.glob("round-*.json")))
    for step in saved_steps(directory):
        try:
            online: dict[str, Any] = load_checkpoint_metadata(directory / str(step)).get("online") or {}
        except ValueError:  # is reported with the checkpoint
            continue
        if online.get("rounds", 0) > num_records:
            yield (
                f"{replay} has the records of {num_records} rounds, but the checkpoint of step {step} has learned from "
                f"{online['rounds']}; restore the others from a copy"
            )


def _checkpoint_parts(directory: Path, prefix: str) -> Iterator[Part]:
    """A checkpoint of a run, or an export."""
    is_export = (directory / EXPORT_FILE).is_file()
    name = EXPORT_FILE if is_export else f"{RUN}/{RUN_FILE}"
    check = _description_problems(directory, is_export)
    yield Part(f"{prefix}{name} and assets", 0, lambda _: _unless_removed(directory, check))
    if is_export and (directory / WEIGHTS_FILE).is_file():
        size = (directory / WEIGHTS_FILE).stat().st_size
        yield Part(
            f"{prefix}{WEIGHTS_FILE}", size, lambda advance: directory_problems(directory, advance, only_recorded=True)
        )
        return
    left_out = read_json_object(directory / HUB_FILE).get("left_out", ()) if (directory / HUB_FILE).is_file() else ()
    items = [item for item in (PARAMS, CRITIC, TRAIN_STATE) if item not in left_out]
    if is_export:  # Whether an export has critics is part of its description.
        items = [PARAMS, *([CRITIC] if (directory / CRITIC).is_dir() else [])]
    for item in items:
        yield Part(f"{prefix}{item}", _size(directory / item), _array_check(directory, item))


def _extracted_parts(directory: Path) -> Iterator[Part]:
    """What `acrlpd runs extract` made."""
    yield Part(f"{PARTS_FILE} and assets", 0, lambda _: _parts_problems(directory))
    for item in (PARAMS, CRITIC):
        if (directory / item).is_dir():
            yield Part(item, _size(directory / item), _array_check(directory, item))


def _parts_problems(directory: Path) -> Iterator[str]:
    try:
        content = load_parts_metadata(directory)
    except ValueError as error:
        yield str(error)
        return
    yield from asset_problems(directory, content["assets"])
    for part in content["parts"]:
        item = directory / PART_DIRECTORIES[part][0]
        if not item.is_dir():
            yield f"{item} is missing: {PARTS_FILE} says that the directory has the {part}"


def _array_check(directory: Path, item: str) -> Callable[[Advance], Iterator[str]]:
    return lambda advance: _unless_removed(directory, directory_problems(directory / item, advance))


def _description_problems(directory: Path, is_export: bool) -> Iterator[str]:
    try:
        if not is_export:
            load_checkpoint_metadata(directory)  # without run.json, the directory would pass for one of openpi's
        elif (directory / WEIGHTS_FILE).is_file():
            yield from asset_problems(directory, load_export_metadata(directory)["assets"])
            return
        checkpoint = open_checkpoint(directory)
    except ValueError as error:
        yield str(error)
        return
    yield from asset_problems(directory, checkpoint.assets or {})
    if checkpoint.has_critics and not (directory / CRITIC).is_dir():
        yield f"{directory / CRITIC} is missing: the checkpoint says that it has critics"


def _unless_removed(directory: Path, problems: Iterator[str]) -> Iterator[str]:
    """The problems of a checkpoint, unless a run that is under way has removed the checkpoint meanwhile."""
    try:
        found = list(problems)
    except FileNotFoundError:
        if directory.is_dir():
            raise
    else:
        if directory.is_dir():
            yield from found


def _size(directory: Path) -> int:
    """Bytes of a directory; 0 if a run that is under way removes the directory."""
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except FileNotFoundError:
        return 0
