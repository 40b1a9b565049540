"""`run_experiment`: a run, or several runs together, with or without baselines, from a config to a report."""

import contextlib
import dataclasses
import gc
import logging
import pathlib
from collections.abc import Sequence

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides
from acrlpd.config.tree import describe_changes
from acrlpd.monitoring.report import generate_training_report
from acrlpd.process import setup_process
from acrlpd.runs import directory as runs
from acrlpd.training.baselines import run_comparison
from acrlpd.training.branching import begin_branch, prepare_branches
from acrlpd.training.checkpoints.metadata import check_resume, read_assets
from acrlpd.training.distributed import barrier, is_primary
from acrlpd.training.drive import EvalFn
from acrlpd.training.going_back import find_resumed_checkpoint, locate_resume, set_aside_newer
from acrlpd.training.members import create_members, joint_name
from acrlpd.training.options import RunOptions
from acrlpd.training.out_of_memory import OutOfMemoryError
from acrlpd.training.train_runs import train_runs

logger = logging.getLogger(__name__)


def run_experiment(rl_config: RLTrainConfig, options: RunOptions, eval_fn: EvalFn | None = None) -> int:
    """Trains as the config says; returns the exit code: 0, or 128 + the signal that ended the run.

    With seeds or tasks in the options, several runs train together. A dry run prepares everything, makes no update and
    leaves no trace.
    """
    setup_process()
    members = create_members(rl_config, options)
    directories = [runs.run_directory(member) for member in members]
    options = locate_resume(options, directories)
    if options.overwrite:
        _keep_starting_points(members, directories, options)
    branch = None
    if options.branch_from is not None:
        branch = prepare_branches(options.branch_from, members, directories)
    with contextlib.ExitStack() as stack:
        if is_primary() and not options.dry_run:
            resume, overwrite = bool(options.resume), options.overwrite
            stack.enter_context(runs.run_directories(directories, resume=resume, overwrite=overwrite))
        for member, directory in zip(members, directories, strict=True) if options.resume else ():
            _check_resume(member, directory, options)
        if options.resume_step is not None:
            options = _go_back(directories, options)
        if branch is not None and not options.dry_run:
            for member, directory in zip(members, directories, strict=True) if is_primary() else ():
                begin_branch(branch, member, directory)
            options = dataclasses.replace(options, resume=True)
        barrier("run directory")
        code = _train(members, directories, options, eval_fn)
        if code == 0 and is_primary() and not options.dry_run:
            for directory in directories:
                write_report([directory])
            if len(directories) > 1:
                write_report(directories, directories[0].with_name(f"{joint_name(rl_config, options)}.html"))
    return code


def _keep_starting_points(
    members: Sequence[RLTrainConfig], directories: Sequence[pathlib.Path], options: RunOptions
) -> None:
    """Refuses to remove a run that holds what the new runs start from."""
    loaders = [member.weight_loader for member in members]
    named = [options.branch_from, *(loader.critics for loader in loaders)]
    named += [loader.path for loader in loaders if loader.kind != "none"]
    for path in filter(None, named):
        place = pathlib.Path(path).expanduser().resolve()
        if any(place.is_relative_to(directory.resolve()) for directory in directories):
            raise ConfigError(f"--overwrite would remove {path}, which the run starts from: choose another --exp_name")


def _train(
    members: Sequence[RLTrainConfig], directories: Sequence[pathlib.Path], options: RunOptions, eval_fn: EvalFn | None
) -> int:
    """Trains the runs. --auto_batch tries again with more micro-batches if the first step does not fit into memory."""
    while True:
        try:
            if members[0].evaluation.baselines and not options.dry_run:
                return run_comparison(members, directories, options)
            return train_runs(members, directories, options, eval_fn=eval_fn)
        except OutOfMemoryError as error:
            steps = error.next_accumulation
            if not options.auto_batch or steps is None:
                for directory in directories if is_primary() else ():
                    runs.remove_empty_logs(directory)
                raise
            logger.warning("%s\n--auto_batch: trying gradient_accumulation_steps=%d", error, steps)
            members = [apply_config_overrides(member, gradient_accumulation_steps=steps) for member in members]
        gc.collect()  # The next try needs the memory of this one.


def write_report(directories: Sequence[pathlib.Path], output: pathlib.Path | None = None) -> None:
    """Writes the report of runs that have ended. A report that cannot be written does not make a run a failure."""
    try:
        logger.info("report %s", generate_training_report(directories, output))
    except (OSError, runs.RunError) as error:
        given = " ".join(map(str, directories))
        logger.error("the report could not be written (%s); `acrlpd report %s` tries again", error, given)


def _go_back(directories: Sequence[pathlib.Path], options: RunOptions) -> RunOptions:
    """Sets aside what the runs have after the step at which they are to go on.

    The runs then go on at their newest checkpoint. A dry run moves nothing, and looks at the checkpoint of the step.
    """
    barrier("check of the step")  # The first process moves files that the others have looked at.
    if options.dry_run:
        return options
    for directory in directories if is_primary() else ():
        assert options.resume_step is not None
        set_aside_newer(directory, options.resume_step)
    return dataclasses.replace(options, resume=True)


def _check_resume(rl_config: RLTrainConfig, directory: pathlib.Path, options: RunOptions) -> None:
    """Refuses to continue with another config, before anything is written."""
    checkpoint = find_resumed_checkpoint(directory, options)
    if checkpoint is None:
        return
    changes = check_resume(checkpoint, rl_config, read_assets(rl_config), options.allow_changed)
    changed = changes.keys() - {"checkpoints.directory"}  # `--resume DIR` names the place of the same run
    if changed and rl_config.evaluation.baselines and runs.is_finished(directory):
        raise ConfigError(
            f"the run {directory} and its baselines are finished and cannot be resumed with another config:\n"
            f"{describe_changes(changes)}\n"
            f"Choose another --exp_name, or --overwrite; --branch_from {directory} starts a new run from this one"
        )
