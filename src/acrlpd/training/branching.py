"""Branches: new runs that start with everything that another run had at one of its checkpoints.

A branch has hard links to the files of the checkpoint and of the replay, so it takes no space and does not depend on
the other run. Its step directory says what the checkpoint would say if it were the branch's own, so that whatever
resumes a run also begins or resumes a branch.
"""

import json
import logging
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from acrlpd.checksums import write_checksums
from acrlpd.config import ConfigError, RLTrainConfig, config_hash, diff_configs, to_dict
from acrlpd.config.create_agent import run_keys
from acrlpd.config.tree import describe_changes, from_dict
from acrlpd.files import link_directory
from acrlpd.runs import directory as runs
from acrlpd.runs.checkpoint_layout import RUN, RUN_FILE, load_checkpoint_metadata
from acrlpd.runs.record import ANOMALIES_FILE
from acrlpd.runs.starting_point import find_starting_point
from acrlpd.training.checkpoints.items import METRICS
from acrlpd.training.checkpoints.metadata import (
    EPISODE_FIELDS,
    HELD_OUT,
    RESUMED_STATE,
    check_assets,
    describe_rng,
    read_assets,
)
from acrlpd.training.checkpoints.reader import require_fitting
from acrlpd.training.online.records import REPLAY, files_after_rounds
from acrlpd.training.sharding import abstract_train_state, create_sharding

logger = logging.getLogger(__name__)

# A new branch has no best evaluation, because the best checkpoint of the other run is not in its directory.
_NO_BEST = {"best": None, "without_improvement": 0}


def prepare_branches(path: str, members: Sequence[RLTrainConfig], directories: Sequence[pathlib.Path]) -> pathlib.Path:
    """The checkpoint that runs branch from. Refuses a checkpoint that does not fit the configs; writes nothing."""
    point = find_starting_point(path, "--branch_from")
    if point.checkpoint is None:
        raise ConfigError(f"--branch_from: {point.directory} has no complete checkpoint yet")
    if point.directory in directories:
        raise ConfigError(
            f"--branch_from: a branch is a new run, and {point.directory} is the run that it starts from: choose "
            "another --exp_name. --resume continues the run itself"
        )
    with runs.only_trainer(point.directory):  # Refuses a run that trains before --overwrite removes another run.
        metadata = load_checkpoint_metadata(point.checkpoint, RESUMED_STATE)
    stored = from_dict(RLTrainConfig, metadata["config"])
    for member in members:
        if metadata["online_start"] is not None and not member.training.online_steps:
            raise ConfigError(
                f"--branch_from: {point.checkpoint} is in its online phase, and training.online_steps is 0. Set "
                "training.online_steps, or branch from a checkpoint of the offline phase"
            )
        require_fitting(point.checkpoint, abstract_train_state(member, create_sharding(member)))
        check_assets(point.checkpoint, metadata["assets"], read_assets(member))
        changes = describe_changes(diff_configs(stored, member))
        logger.info("%s branches from %s with these changes:\n%s", member.exp_name, point.checkpoint, changes)
    return point.checkpoint


def begin_branch(checkpoint: pathlib.Path, rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
    """Makes `directory` a run that goes on after the checkpoint of another run, with a config of its own.

    Everything is gathered first, and gets its name in the directory at the end: a kill leaves a branch that has not
    begun. This process holds the lock of the directory.
    """
    source, metadata = checkpoint.parent, load_checkpoint_metadata(checkpoint, RESUMED_STATE)
    partial = directory / runs.UNFINISHED_BRANCH
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()  # From now on, --resume does not take the branch for a run that begins anew.
    runs.write_run_config(directory, rl_config)
    with runs.only_trainer(source):  # A run that trains removes checkpoints.
        for name in (runs.METRICS_FILE, ANOMALIES_FILE):  # The branch goes on with the lines up to its first step.
            if (source / name).is_file():
                shutil.copy2(source / name, partial / name)
        rounds = (metadata["online"] or {}).get("rounds", 0)
        if rounds:
            later = {path.name for path in files_after_rounds(source / REPLAY, rounds)}
            link_directory(source / REPLAY, partial / REPLAY, later)
        link_directory(checkpoint, partial / checkpoint.name, {RUN, METRICS})
    _write_run_file(partial / checkpoint.name, _branched(metadata, rl_config, checkpoint))
    for path in sorted(partial.iterdir(), key=lambda path: path.name == checkpoint.name):  # the checkpoint goes last
        if (target := directory / path.name).is_dir():  # of an attempt that was killed here
            shutil.rmtree(target)
        path.rename(target)
    partial.rmdir()


def _branched(metadata: Mapping[str, Any], rl_config: RLTrainConfig, checkpoint: pathlib.Path) -> dict[str, Any]:
    """What the checkpoint of a run says about itself as the first checkpoint of a branch."""
    stored = from_dict(RLTrainConfig, metadata["config"])
    changes = diff_configs(stored, rl_config)
    changed: dict[str, Any] = {
        "config": to_dict(rl_config),
        "config_hash": config_hash(rl_config),
        "branched_from": str(checkpoint),
        "data": {**metadata["data"], "seed": rl_config.seed},
        "evaluation": {**metadata["evaluation"], **_NO_BEST},
        "wall_time_s": 0.0,
    }
    if "seed" in changes:  # With the key of the other run, branches with several seeds would draw the same noise.
        changed["rng"] = describe_rng(run_keys(rl_config).updates)
    if any(name in changes for name in EPISODE_FIELDS):
        changed[HELD_OUT] = None
    return {**metadata, **changed}


def _write_run_file(step_directory: pathlib.Path, metadata: Mapping[str, Any]) -> None:
    directory = step_directory / RUN
    directory.mkdir()
    (directory / RUN_FILE).write_text(json.dumps(metadata))
    write_checksums(directory)
