"""Going on at an older checkpoint of a run: what the run did after it is set aside, not deleted.

Every moment of setting aside leaves a run that can be resumed. The newest checkpoint goes first, and what it needs goes
after all checkpoints that need it.
"""

import dataclasses
import logging
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from acrlpd.config import ConfigError
from acrlpd.files import is_whole_number, link_directory
from acrlpd.runs import directory as runs
from acrlpd.runs.checkpoint_layout import load_checkpoint_metadata
from acrlpd.runs.record import ANOMALIES_FILE, EVALUATIONS
from acrlpd.runs.starting_point import find_starting_point, missing_step
from acrlpd.training.online.records import REPLAY, files_after_rounds
from acrlpd.training.options import RunOptions

logger = logging.getLogger(__name__)

SET_ASIDE = "set_aside"


def locate_resume(options: RunOptions, directories: Sequence[pathlib.Path]) -> RunOptions:
    """The options with a step, or nothing, in place of the directory that --resume may name.

    Refuses a directory that is not the one of the config.
    """
    if not isinstance(options.resume, str) or is_whole_number(options.resume):
        return options
    point = find_starting_point(options.resume, "--resume")
    if len(directories) > 1:
        raise ConfigError(
            f"--resume {options.resume} is one run, and --seeds or --tasks ask for {len(directories)}. Resume them "
            "together with --config, --exp_name and --resume, or --resume STEP; or leave --seeds and --tasks out"
        )
    if directories[0] != point.directory:
        raise ConfigError(
            f"--resume {options.resume} contradicts the config, whose run is {directories[0]}: leave --config, "
            "--exp_name and --checkpoint_dir out, because the run has a config of its own. A new run with what this "
            "run has learned starts with --branch_from"
        )
    return dataclasses.replace(options, resume=True if point.step is None else str(point.step))


def find_resumed_checkpoint(directory: pathlib.Path, options: RunOptions) -> pathlib.Path | None:
    """The checkpoint at which a run goes on; None if the run has no checkpoint yet."""
    steps = runs.saved_steps(directory)
    if options.resume_step is not None and options.resume_step not in steps:
        raise ConfigError(f"--resume: {missing_step(directory, options.resume_step)}")
    if not steps:
        return None
    return directory / str(steps[-1] if options.resume_step is None else options.resume_step)


def set_aside_newer(directory: pathlib.Path, step: int) -> None:
    """Moves what a run has done after `step` to a folder in its directory. This process holds the lock of the run.

    Nothing is moved if the checkpoint of this step is the newest one: then the run goes on as after a kill.
    """
    newer = [other for other in runs.saved_steps(directory) if other > step]
    if not newer:
        return
    online = load_checkpoint_metadata(directory / str(step)).get("online") or {}
    folder = _new_folder(directory, step)
    for name in (runs.METRICS_FILE, ANOMALIES_FILE):  # The run goes on with the lines up to the step.
        if (directory / name).is_file():
            shutil.copy2(directory / name, folder / name)
    for path in _paths_after(directory, step, newer, online.get("rounds", 0)):
        target = folder / path.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    if (folder / REPLAY).is_dir():  # The checkpoints that were set aside have learned from the earlier rounds, too.
        link_directory(directory / REPLAY, folder / REPLAY)
    steps = ", ".join(map(str, newer))
    logger.warning("going back to step %d: the newer checkpoints (%s) are set aside in %s", step, steps, folder)


def _paths_after(directory: pathlib.Path, step: int, newer: Sequence[int], num_rounds: int) -> Iterator[pathlib.Path]:
    """What to move, in an order in which the newest checkpoint that is left always has all that it needs.

    `newer` are the steps of the checkpoints after `step`, at which the run had taken `num_rounds` rounds.
    """
    for other in reversed(newer):
        yield directory / str(other)
    summary = directory / runs.SUMMARY_FILE
    if summary.is_file():
        yield summary
    for path in sorted((directory / EVALUATIONS).glob("*")):
        if is_whole_number(path.name) and int(path.name) > step:
            yield path
    yield from files_after_rounds(directory / REPLAY, num_rounds)


def _new_folder(directory: pathlib.Path, step: int) -> pathlib.Path:
    """A folder whose name says what it holds; a run may go back to the same step several times."""
    parent, name, number = directory / SET_ASIDE, f"after-{step}", 1
    parent.mkdir(exist_ok=True)
    while (folder := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    folder.mkdir()
    return folder
