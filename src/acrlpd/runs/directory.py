"""The directory of a run: <checkpoint_dir>/<config>/<exp_name>/, and what is allowed to happen to it."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acrlpd.config import ConfigError, RLTrainConfig, config_to_yaml
from acrlpd.files import LOCK, is_whole_number, only_one, path_within, read_json_object, write_text_atomically
from acrlpd.units import format_bytes

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
UNFINISHED_BRANCH = "branch.partial"  # what a branch takes over, until all of it is here
FINISHED = "finished"
_ELSEWHERE = "set checkpoints.directory to a place that can be written to"


class RunError(ValueError):
    """A directory that does not hold a run, or a file of a run that cannot be read."""


def run_directory(rl_config: RLTrainConfig) -> pathlib.Path:
    base = pathlib.Path(rl_config.checkpoints.directory).expanduser().absolute()
    return path_within(base, f"{rl_config.name}/{rl_config.exp_name}", "<config name>/<exp_name>")


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints, in order; a checkpoint that is being written has another name."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if is_whole_number(entry.name))


def prepare_run_directories(directories: Sequence[pathlib.Path], *, resume: bool, overwrite: bool) -> None:
    """Makes the directories of runs that train together. If one of them is refused, all stay as they are."""
    for directory in directories:
        _check_run_directory(directory, resume=resume, overwrite=overwrite)
    for directory in directories:
        _make_run_directory(directory, overwrite=overwrite)


@contextlib.contextmanager
def run_directories(directories: Sequence[pathlib.Path], *, resume: bool, overwrite: bool) -> Iterator[None]:
    """As `prepare_run_directories`, and nobody else trains in the directories for the time of the runs.

    Of runs that fail before they begin nothing is left. What was there before stays, and so does what belongs to
    another process: only a directory whose lock this process holds is emptied.
    """
    new = [path for directory in directories for path in (directory, *directory.parents) if not path.exists()]
    begun_empty: list[pathlib.Path] = []
    with contextlib.ExitStack() as locks:
        try:
            prepare_run_directories(directories, resume=resume, overwrite=overwrite)
            for directory in directories:
                locks.enter_context(only_trainer(directory))
                if not _holds_something(directory):
                    begun_empty.append(directory)
            yield
        except BaseException:
            for directory in begun_empty:
                _remove_failed_start(directory)
            for path in new:
                with contextlib.suppress(OSError):  # It is not empty: others may have put something there.
                    path.rmdir()
            raise


def _check_run_directory(directory: pathlib.Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses a directory that holds another run."""
    exists = _holds_something(directory)
    if resume and not exists:
        raise ConfigError(f"--resume: there is no run in {directory}; start this run alone, without --resume")
    if resume and not saved_steps(directory) and (directory / UNFINISHED_BRANCH).exists():
        raise ConfigError(f"{directory} is a branch that was interrupted before it began: give --branch_from again")
    if exists and overwrite:
        if not (directory / CONFIG_FILE).is_file():
            raise ConfigError(
                f"--overwrite: {directory} is not the directory of a run (it has no {CONFIG_FILE}); move it away"
            )
        with only_trainer(directory):
            return
    if exists and not resume and not _is_failed_start(directory):
        steps = saved_steps(directory)
        what = f"with checkpoints up to step {steps[-1]}" if steps else "without a checkpoint"
        raise ConfigError(
            f"{directory} holds a run {what}: continue it with --resume, replace it with --overwrite, or "
            f"choose another --exp_name"
        )


def _holds_something(directory: pathlib.Path) -> bool:
    return directory.exists() and any(path.name != LOCK for path in directory.iterdir())


def _make_run_directory(directory: pathlib.Path, *, overwrite: bool) -> None:
    """Makes the directory. Removes the run in it only with `overwrite`."""
    if overwrite and _holds_something(directory):
        _remove_run(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory} ({error.strerror}); {_ELSEWHERE}") from error
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"cannot write to the run directory {directory}; {_ELSEWHERE}")


def _is_failed_start(directory: pathlib.Path) -> bool:
    """Whether the directory holds nothing but configs: a run that failed before it began does not keep its name."""
    if (directory / UNFINISHED_BRANCH).exists() and not saved_steps(directory):
        return True  # A branch that has not begun holds links and copies alone.
    leaves = filter(_is_leaf, directory.rglob("*"))
    return all(path.name in (CONFIG_FILE, f"{CONFIG_FILE}.tmp", LOCK) for path in leaves)


def _is_leaf(path: pathlib.Path) -> bool:
    """Whether nothing is found below: a file, an empty directory, or a link, also one to a disk that is away."""
    return path.is_symlink() or not path.is_dir() or not any(path.iterdir())


def remove_empty_logs(directory: pathlib.Path) -> None:
    """Removes the logs of a run that made no update, which then counts as a start that failed."""
    for path in directory.rglob("*.jsonl"):
        if path.stat().st_size == 0:
            path.unlink()


def _remove_failed_start(directory: pathlib.Path) -> None:
    """Empties the directory of a run that failed before it began. This process holds the lock of the directory.

    The lock goes last: another process that starts after that finds nothing that is still to be removed.
    """
    if not _is_failed_start(directory):
        return
    with contextlib.suppress(OSError):  # The error that ended the run is the one to report.
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        (directory / LOCK).unlink()


def _remove_run(directory: pathlib.Path) -> None:
    """Removes a run and says what it removes."""
    steps = saved_steps(directory)
    others = sorted(
        entry.name for entry in directory.iterdir() if not is_whole_number(entry.name) and entry.name != LOCK
    )
    checkpoints = f"{len(steps)} checkpoints ({', '.join(map(str, steps))})" if steps else "no checkpoint"
    with only_trainer(directory):
        logger.warning("--overwrite: removing %s: %s, %s", directory, checkpoints, ", ".join(others))
        shutil.rmtree(directory)


def only_trainer(directory: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Refuses a second process in a directory: two processes would remove each other's checkpoints."""
    what_to_do = "wait for it or stop it (SIGTERM makes it save first), or choose another --exp_name"
    return only_one(directory, f"training here: {what_to_do}", ConfigError)


def write_run_config(directory: pathlib.Path, rl_config: RLTrainConfig) -> None:
    write_text_atomically(directory / CONFIG_FILE, config_to_yaml(rl_config))


def write_summary(directory: pathlib.Path, summary: Mapping[str, Any]) -> None:
    write_text_atomically(directory / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def read_run_file(path: pathlib.Path) -> dict[str, Any] | None:
    """The JSON object in a file of a run; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return read_json_object(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}. Remove it, or take it from a backup") from error


def read_summary(directory: pathlib.Path) -> dict[str, Any]:
    """The summary of a run that has ended; empty for other runs."""
    return read_run_file(directory / SUMMARY_FILE) or {}


def is_finished(directory: pathlib.Path) -> bool:
    """Whether the run in `directory` came to its end, rather than being stopped by a signal."""
    return read_summary(directory).get("status", "").startswith(FINISHED)


def warn_about_space(directory: pathlib.Path, checkpoint_bytes: int, max_to_keep: int) -> None:
    """Warns if the disk lacks space for the checkpoints: the oldest one is removed after the newest one is written."""
    needed = checkpoint_bytes * (max_to_keep + 1)
    free = shutil.disk_usage(directory).free
    if free < needed:
        logger.warning(
            "%s has %s free; checkpoints of %s, %d kept and one being written, need %s",
            directory,
            format_bytes(free),
            format_bytes(checkpoint_bytes),
            max_to_keep,
            format_bytes(needed),
        )
