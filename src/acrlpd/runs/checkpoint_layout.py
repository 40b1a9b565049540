"""What a checkpoint of a run holds, by name, and reading what it says about its run.

params/       the policy as stock openpi loads it: the moving average where there is one
assets/       <asset_id>/norm_stats.json, where openpi looks for it
train_state/  every other array of the agent
run/          run.json: config, data cursor, random key, open metrics, versions
"""

import json
import pathlib
from typing import Any

from etils import epath

from acrlpd.runs.directory import saved_steps

PARAMS = "params"
ASSETS = "assets"
TRAIN_STATE = "train_state"
RUN = "run"
RUN_FILE = "run.json"
FORMAT = 1  # of run.json


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def load_checkpoint_metadata(step_directory: epath.PathLike) -> dict[str, Any]:
    """The content of run.json."""
    path = epath.Path(step_directory) / RUN / RUN_FILE
    if not path.exists():
        raise CheckpointError(f"{step_directory} is not a checkpoint of a run: it has no {RUN}/{RUN_FILE}")
    try:
        metadata = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{step_directory} was written in format {metadata['format']} by acrlpd "
            f"{metadata['versions']['acrlpd']}; this version reads format {FORMAT}"
        )
    return metadata


def newest_step_directory(path: pathlib.Path) -> pathlib.Path:
    """`path` if it is a step directory, else the newest complete step directory in it."""
    if (path / RUN / RUN_FILE).exists():
        return path
    steps = saved_steps(path)
    if not steps:
        raise CheckpointError(f"{path} has no complete checkpoint: expected a run directory or one of its steps")
    return path / str(steps[-1])
