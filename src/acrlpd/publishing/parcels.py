"""What of a directory is uploaded: a policy of an export or of a run's checkpoint, or a dataset.

Everything is named: a file that is not part of a policy or of a dataset stays here, and so does the state of the
optimizers unless it is asked for.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from acrlpd.checksums import CHECKSUMS_FILE, file_checksum
from acrlpd.data.pipeline.labels import labels_path
from acrlpd.data.sources.source import open_source
from acrlpd.data.tools.inspect import inspect_source
from acrlpd.hub import HubAddress, HubError, Kind
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.publishing.cards import checkpoint_card, dataset_card, export_card
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    CRITIC,
    EXPORT_FILE,
    PARAMS,
    RUN,
    RUN_FILE,
    TRAIN_STATE,
    load_described_config,
    load_export_metadata,
    newest_step_directory,
)
from acrlpd.runs.directory import CONFIG_FILE, RunError, saved_steps
from acrlpd.runs.record import RunRecord, read_run

# The directories of a LeRobot dataset. The hub's own files and everything hidden stay behind.
_DATASET = ("meta", "data", "videos", "images")
LABELS_FILE = "labels.json"  # lies beside a dataset here, and inside on the hub
README = "README.md"


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Files by their names in the repository, and what is written for them."""

    kind: Kind
    directory: Path  # the export, the checkpoint or the dataset
    title: str
    files: Mapping[str, Path]
    card: Callable[[HubAddress], str]  # the README of the repository
    description: Mapping[str, Any]  # hub.json
    tags: tuple[str, ...]
    record: RunRecord | None = None  # of the run that a policy comes from, where it is at hand

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def pack(directory: Path, *, train_state: bool = False) -> Parcel:
    """What is uploaded of a directory: an export, a run (its newest checkpoint), a checkpoint, or a LeRobot dataset."""
    directory = directory.expanduser().absolute()
    if (directory / EXPORT_FILE).is_file():
        return _pack_export(directory)
    if (directory / "meta" / "info.json").is_file():
        return _pack_dataset(directory)
    if (directory / RUN / RUN_FILE).is_file() or saved_steps(directory):
        return _pack_checkpoint(newest_step_directory(directory), train_state)
    raise HubError(
        f"{directory} is nothing to upload: expected an export ({EXPORT_FILE}), a run (numbered checkpoints), one of "
        f"its checkpoints ({RUN}/{RUN_FILE}), or a LeRobot dataset (meta/info.json)"
    )


def _pack_checkpoint(directory: Path, train_state: bool) -> Parcel:
    checkpoint = open_checkpoint(directory)
    items = [PARAMS, CRITIC, ASSETS, RUN, *([TRAIN_STATE] if train_state else [])]
    files = dict(_files(directory, items))
    run = directory.parent
    if (run / CONFIG_FILE).is_file():
        files[CONFIG_FILE] = run / CONFIG_FILE
    record = _read_record(run)
    return Parcel(
        kind="model",
        directory=directory,
        title=f"{checkpoint.rl_config.name}, step {checkpoint.step}",
        files=files,
        card=lambda address: checkpoint_card(checkpoint, record, address),
        description={"holds": "checkpoint", "step": checkpoint.step, "left_out": [] if train_state else [TRAIN_STATE]},
        tags=(f"step-{checkpoint.step}",),
        record=record,
    )


def _pack_export(directory: Path) -> Parcel:
    content, rl_config = load_export_metadata(directory), load_described_config(directory)
    files = dict(_files(directory, [PARAMS, CRITIC, ASSETS]))
    for name in (EXPORT_FILE, CHECKSUMS_FILE, WEIGHTS_FILE, "config.json"):
        if (directory / name).is_file():
            files[name] = directory / name
    readme = (directory / README).read_text() if (directory / README).is_file() else ""
    record = _read_record(Path(content["source"]).parent) if "source" in content else None
    return Parcel(
        kind="model",
        directory=directory,
        title=f"{rl_config.name}, step {content['step']}",
        files=files,
        card=lambda address: export_card(readme, rl_config, content["step"], record, address),
        description={"holds": "export", "step": content["step"], "left_out": []},
        tags=(f"step-{content['step']}",),
        record=record,
    )


def _pack_dataset(directory: Path) -> Parcel:
    files = dict(_files(directory, _DATASET))
    labels = labels_path(directory)
    if labels.is_file():
        files[LABELS_FILE] = labels
    report = inspect_source(open_source(directory))
    version = str(json.loads((directory / "meta" / "info.json").read_text()).get("codebase_version", ""))
    # A dataset has no checksums of its own.
    checksums = {name: [path.stat().st_size, file_checksum(path)] for name, path in files.items()}
    return Parcel(
        kind="dataset",
        directory=directory,
        title=f"{report.episodes} episodes",
        files=files,
        card=lambda address: dataset_card(report, address),
        description={"holds": "dataset", "files": checksums},
        tags=(version,) if version else (),  # lerobot reads the state that has the version of the layout as its tag
    )


def _files(directory: Path, items: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Every file below `items`, without hidden files."""
    for item in items:
        for path in sorted((directory / item).rglob("*")):
            name = path.relative_to(directory)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                yield name.as_posix(), path


def _read_record(run: Path) -> RunRecord | None:
    """The record of a run, if it is on this machine and has metrics."""
    with contextlib.suppress(RunError):
        return read_run(run)
    return None
