"""The directory of a run: <checkpoint_dir>/<config>/<exp_name>/, and what is allowed to happen to it."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from acrlpd.config import ConfigError, RLTrainConfig, save_config
from acrlpd.files import LOCK, only_one

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
FINISHED = "finished"
_ELSEWHERE = "set checkpoints.directory to a place that can be written to"


def run_directory(rl_config: RLTrainConfig) -> pathlib.Path:
    base = pathlib.Path(rl_config.checkpoints.directory).expanduser().absolute()
    return base / rl_config.name / rl_config.exp_name


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints, in order; one that is being written has another name."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def prepare_run_directory(directory: pathlib.Path, *, resume: bool, overwrite: bool) -> None:
    """Makes the directory, or refuses one that holds another run. Removes only what `overwrite` allows."""
    exists = directory.exists() and any(path.name != LOCK for path in directory.iterdir())
    if resume and not exists:
        raise ConfigError(f"--resume: there is no run in {directory}; start it without --resume")
    if exists and overwrite:
        _remove_run(directory)
    elif exists and not resume and not _is_failed_start(directory):
        steps = saved_steps(directory)
        what = f"with checkpoints up to step {steps[-1]}" if steps else "without a checkpoint"
        raise ConfigError(
            f"{directory} holds a run {what}: continue it with --resume, replace it with --overwrite, or "
            f"choose another --exp_name"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory} ({error.strerror}); {_ELSEWHERE}") from error
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"cannot write to the run directory {directory}; {_ELSEWHERE}")


def _is_failed_start(directory: pathlib.Path) -> bool:
    """Whether there is nothing but configs: what stopped a run before it began is no reason to keep its name."""
    leaves = (path for path in directory.rglob("*") if path.is_file() or not any(path.iterdir()))
    return all(path.name in (CONFIG_FILE, LOCK) for path in leaves)


def _remove_run(directory: pathlib.Path) -> None:
    """Says what goes before it goes; a directory that is not a run's stays."""
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--overwrite: {directory} is not the directory of a run (it has no {CONFIG_FILE}); move it away"
        )
    steps = saved_steps(directory)
    others = sorted(entry.name for entry in directory.iterdir() if not entry.name.isdigit() and entry.name != LOCK)
    checkpoints = f"{len(steps)} checkpoints ({', '.join(map(str, steps))})" if steps else "no checkpoint"
    with only_trainer(directory):
        logger.warning("--overwrite: removing %s: %s, %s", directory, checkpoints, ", ".join(others))
        shutil.rmtree(directory)


def only_trainer(directory: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Refuses a second process in a directory: two would take each other's checkpoints apart."""
    what_to_do = "wait for it or stop it (SIGTERM makes it save first), or choose another --exp_name"
    return only_one(directory, f"training here: {what_to_do}", ConfigError)


def write_run_config(directory: pathlib.Path, rl_config: RLTrainConfig) -> None:
    temporary = directory / (CONFIG_FILE + ".tmp")
    save_config(rl_config, temporary)
    temporary.replace(directory / CONFIG_FILE)


def write_summary(directory: pathlib.Path, summary: Mapping[str, Any]) -> None:
    temporary = directory / (SUMMARY_FILE + ".tmp")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(directory / SUMMARY_FILE)


def remove_summary(directory: pathlib.Path) -> None:
    """A run that goes on is not over: who looks at it must not be told how it ended before."""
    (directory / SUMMARY_FILE).unlink(missing_ok=True)


def read_summary(directory: pathlib.Path) -> dict[str, Any]:
    """The summary of a run that ended; empty where there is none."""
    path = directory / SUMMARY_FILE
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); without it the run counts as not finished") from error


def is_finished(directory: pathlib.Path) -> bool:
    """Whether the run in `directory` came to its end, and not to a signal."""
    return read_summary(directory).get("status", "").startswith(FINISHED)


def warn_about_space(directory: pathlib.Path, checkpoint_bytes: int, max_to_keep: int) -> None:
    """Two checkpoints exist for a moment before the older one goes."""
    needed = checkpoint_bytes * (max_to_keep + 1)
    free = shutil.disk_usage(directory).free
    if free < needed:
        logger.warning(
            "%s has %.1f GiB free; checkpoints of %.1f GiB, %d kept and one being written, need %.1f GiB",
            directory,
            free / 2**30,
            checkpoint_bytes / 2**30,
            max_to_keep,
            needed / 2**30,
        )
