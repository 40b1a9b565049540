"""What a checkpoint of a run holds, by name, and reading and verifying what a checkpoint says about itself.

params/       the policy as stock openpi loads it: the moving average where there is one
assets/       <asset_id>/norm_stats.json, where openpi looks for it
critic/       the critics, and the other arrays by which a policy chooses among candidates
train_state/  every other array of the agent
run/          run.json: config, data cursor, random key, open metrics, versions, the SHA-256 of the assets

Each of them but assets/ has a checksums.json. An export has params/, assets/, critic/, and acrlpd.json for run/. Parts
that were extracted (`runs.parts`) are params/ with assets/, or critic/, or all of them, and parts.json.
"""

import hashlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from acrlpd.checksums import file_problem, read_checksums
from acrlpd.config import RLTrainConfig
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.config.tree import from_dict
from acrlpd.files import read_json_object
from acrlpd.runs.directory import saved_steps

PARAMS = "params"
ASSETS = "assets"
CRITIC = "critic"
TRAIN_STATE = "train_state"
RUN = "run"
RUN_FILE = "run.json"
EXPORT_FILE = "acrlpd.json"
PARTS_FILE = "parts.json"
HUB_FILE = "hub.json"  # in a copy that was on the hub: what the directory holds, and which items were left out
FORMAT = 2  # of run.json, of the acrlpd.json of an export, and of the parts.json of parts

# What runs did before a field of the config existed, where this is not the default of the field: <section>.<field>.
FORMER_VALUES = {"data.validation_share": 0.0}

Types = type | tuple[type, ...]
# What both descriptions hold, and what each of them adds.
_KEYS: dict[str, Types] = {"format": int, "step": int, "config": dict, "assets": dict}
_RUN_KEYS: dict[str, Types] = {"params_hold_average": bool, "rng": dict}
_EXPORT_KEYS: dict[str, Types] = {"serving": dict, "critics": (list, type(None))}
_PARTS_KEYS: dict[str, Types] = {"parts": list}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def load_checkpoint_metadata(step_directory: pathlib.Path, also: Mapping[str, Types] | None = None) -> dict[str, Any]:
    """The content of run.json; `also` are keys, with their types, that the caller needs beside the usual keys."""
    path = step_directory / RUN / RUN_FILE
    if not path.exists():
        raise CheckpointError(f"{step_directory} is not a checkpoint of a run: it has no {RUN}/{RUN_FILE}")
    return _read_description(path, _RUN_KEYS | dict(also or {}))


def load_export_metadata(directory: pathlib.Path) -> dict[str, Any]:
    """The content of the acrlpd.json of an export."""
    return _read_description(directory / EXPORT_FILE, _EXPORT_KEYS)


def load_parts_metadata(directory: pathlib.Path) -> dict[str, Any]:
    """The content of the parts.json of extracted parts."""
    return _read_description(directory / PARTS_FILE, _PARTS_KEYS)


def load_described_config(directory: pathlib.Path) -> RLTrainConfig:
    """The config with which the content of a directory was trained: a checkpoint, an export, or parts."""
    if (directory / EXPORT_FILE).exists():
        metadata = load_export_metadata(directory)
    elif (directory / PARTS_FILE).exists():
        metadata = load_parts_metadata(directory)
    else:
        metadata = load_checkpoint_metadata(directory)
    return from_dict(RLTrainConfig, metadata["config"])


def _read_description(path: pathlib.Path, keys: Mapping[str, Types]) -> dict[str, Any]:
    """The content of a file that describes a checkpoint, if the file is as it was written."""
    fix = f"Copy {path.name} again from a place where it is intact, or use another checkpoint"
    try:
        content = read_json_object(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {fix}") from error
    if content.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}; this version of acrlpd reads format {FORMAT}. Train or export "
            "again"
        )
    keys = _KEYS | dict(keys)
    if missing := [key for key in keys if key not in content]:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}. {fix}")
    for key, types in keys.items():
        if not isinstance(content[key], types):
            names = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
            raise CheckpointError(
                f"{path} is damaged: {key} must be {names}; found {type(content[key]).__name__}. {fix}"
            )
    checksums = read_checksums(path.parent)
    problem = file_problem(path, checksums[path]) if path in checksums else f"{path} has no checksum"
    if problem is not None:
        raise CheckpointError(f"{problem}. {fix}")
    for name, value in FORMER_VALUES.items():
        section, field = name.split(".")
        content["config"].setdefault(section, {}).setdefault(field, value)
    return content


def newest_step_directory(path: str | pathlib.Path) -> pathlib.Path:
    """`path` if it is a step directory, else the newest complete step directory in it; absolute."""
    path = pathlib.Path(path).expanduser().absolute()
    if (path / RUN / RUN_FILE).exists():
        return path
    steps = saved_steps(path)
    if not steps:
        raise CheckpointError(f"{path} has no complete checkpoint: expected a run directory or one of its steps")
    return path / str(steps[-1])


def describe_assets(files: Mapping[str, bytes]) -> dict[str, str]:
    """What a description says about the files of assets/: their names and SHA-256."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def asset_problems(directory: pathlib.Path, recorded: Mapping[str, str]) -> Iterator[str]:
    """What differs between the assets of a checkpoint and those that its description names."""
    assets = directory / ASSETS
    for name, expected in recorded.items():
        path = assets / name
        if not path.is_file():
            yield f"{path} is missing; expected a file with the SHA-256 {expected}"
        elif (found := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
            yield f"{path} has changed since it was written: expected the SHA-256 {expected}, found {found}"
    for path in sorted(assets.rglob(NORM_STATS_FILE)):
        if path.relative_to(assets).as_posix() not in recorded:
            yield f"{path} was added later: the policy was trained without these norm statistics"


def verify_assets(directory: pathlib.Path, recorded: Mapping[str, str], fix: str) -> None:
    """Refuses assets that are not those that the checkpoint was saved with."""
    if problems := list(asset_problems(directory, recorded)):
        raise CheckpointError("\n".join(problems) + f"\n{fix}")
