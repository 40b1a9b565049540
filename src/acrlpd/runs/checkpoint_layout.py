"""What a checkpoint of a run holds, by name, and reading what it says about its run.

params/       the policy as stock openpi loads it: the moving average where there is one
assets/       <asset_id>/norm_stats.json, where openpi looks for it
train_state/  every other array of the agent
run/          run.json: config, data cursor, random key, open metrics, versions
"""

import json
import pathlib
from typing import Any

from acrlpd.runs.directory import saved_steps

PARAMS = "params"
ASSETS = "assets"
TRAIN_STATE = "train_state"
RUN = "run"
RUN_FILE = "run.json"
FORMAT = 1  # of run.json, and of the acrlpd.json of an export


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def load_checkpoint_metadata(step_directory: pathlib.Path) -> dict[str, Any]:
    """The content of run.json."""
    path = step_directory / RUN / RUN_FILE
    if not path.exists():
        raise CheckpointError(f"{step_directory} is not a checkpoint of a run: it has no {RUN}/{RUN_FILE}")
    return read_description(path)


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """The content of a run.json or of an export's acrlpd.json."""
    try:
        content = json.loads(path.read_text())
        found = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found}; this version of acrlpd reads format {FORMAT}. Train or export again"
        )
    return content


def newest_step_directory(path: pathlib.Path) -> pathlib.Path:
    """`path` if it is a step directory, else the newest complete step directory in it."""
    if (path / RUN / RUN_FILE).exists():
        return path
    steps = saved_steps(path)
    if not steps:
        raise CheckpointError(f"{path} has no complete checkpoint: expected a run directory or one of its steps")
    return path / str(steps[-1])
