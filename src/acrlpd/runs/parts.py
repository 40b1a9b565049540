"""Parts of a checkpoint: the policy alone, or the critics alone, for other runs to start from."""

import json
import pathlib
import shutil
from collections.abc import Sequence

from acrlpd.checksums import directory_problems, write_checksums
from acrlpd.config import ConfigError
from acrlpd.config.command_line import CRITICS, POLICY
from acrlpd.files import new_directory
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    CRITIC,
    FORMAT,
    PARAMS,
    PARTS_FILE,
    CheckpointError,
    load_checkpoint_metadata,
    load_described_config,
    newest_step_directory,
)
from acrlpd.runs.directory import saved_steps

# The directories of each part in a checkpoint. assets/ belongs to the policy: it acts in the units of its statistics.
PART_DIRECTORIES = {POLICY: (PARAMS, ASSETS), CRITICS: (CRITIC,)}


def extract_parts(path: pathlib.Path, parts: Sequence[str], output: pathlib.Path) -> pathlib.Path:
    """Copies parts of a checkpoint to the new directory `output`; returns the checkpoint.

    The copies are compared with their checksums. `output` is complete or absent.
    """
    output = output.expanduser().absolute()
    if output.exists():
        raise ConfigError(f"{output} exists already; choose another --output")
    checkpoint = newest_step_directory(path)
    metadata = load_checkpoint_metadata(checkpoint)
    if CRITICS in parts:
        require_trained_critics(checkpoint / CRITIC)
    kept = {"format": FORMAT, "step": metadata["step"], "config": metadata["config"], "parts": list(parts)}
    kept |= {"assets": metadata["assets"] if POLICY in parts else {}, "extracted_from": str(checkpoint)}
    with new_directory(output) as partial:
        for name in (name for part in parts for name in PART_DIRECTORIES[part]):
            if (checkpoint / name).is_dir():  # fake data has no assets
                shutil.copytree(checkpoint / name, partial / name)
            for problem in directory_problems(partial / name) if name != ASSETS else ():
                raise CheckpointError(f"{problem}; the copy of {checkpoint / name} is not what was saved")
        (partial / PARTS_FILE).write_text(json.dumps(kept) + "\n")
        write_checksums(partial, [partial / PARTS_FILE])
    return checkpoint


def find_policy(path: str) -> str:
    """The directory of a policy that a path names: of a run the newest checkpoint, else the path as it is."""
    local = pathlib.Path(path).expanduser()
    return str(newest_step_directory(local)) if _is_run(local) else path


def find_critics(path: str) -> pathlib.Path:
    """The directory with the critics of a checkpoint, of the newest checkpoint of a run, of an export, or of parts."""
    given = pathlib.Path(path).expanduser().absolute()
    if not given.is_dir():
        raise CheckpointError(
            f"{given} does not exist: expected a directory with critics; weight_loader.critics names it"
        )
    directory = (newest_step_directory(given) if _is_run(given) else given) / CRITIC
    if not directory.is_dir():
        raise CheckpointError(
            f"{given} has no critics: expected a run or a checkpoint of acrlpd, an export with critics, or parts that "
            "`acrlpd runs extract` made with the critics; a checkpoint of openpi has a policy alone"
        )
    require_trained_critics(directory)
    return directory


def require_trained_critics(directory: pathlib.Path) -> None:
    """Refuses critics that were never trained, because their run only cloned."""
    config = load_described_config(directory.parent)
    if config.acrlpd.loss_weights.critic_weight == 0:
        raise CheckpointError(
            f"{directory.parent} has critics as they were initialised: its run trained none "
            "(acrlpd.loss_weights.critic_weight=0)"
        )


def _is_run(directory: pathlib.Path) -> bool:
    """Whether a directory has numbered checkpoints; a checkpoint, an export and parts have none."""
    return bool(saved_steps(directory))
