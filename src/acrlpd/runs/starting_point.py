"""Which checkpoint of which run a path means, and what a path is that means none."""

import dataclasses
import pathlib

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, load_config
from acrlpd.files import is_whole_number
from acrlpd.hub import is_hub_address
from acrlpd.runs.checkpoint_layout import (
    EXPORT_FILE,
    PARAMS,
    PARTS_FILE,
    RUN,
    RUN_FILE,
    load_described_config,
)
from acrlpd.runs.directory import CONFIG_FILE, saved_steps


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """A checkpoint of a run, or a run that has no checkpoint yet."""

    directory: pathlib.Path  # of the run
    step: int | None  # that the path names; None: the path names the run

    @property
    def checkpoint(self) -> pathlib.Path | None:
        """The step directory: that of the path, or else the newest one."""
        step = max(saved_steps(self.directory), default=None) if self.step is None else self.step
        return None if step is None else self.directory / str(step)

    def stored_config(self) -> RLTrainConfig:
        """The config that the checkpoint was written with; before the first checkpoint, that of the run."""
        if self.checkpoint is None:
            return load_config(str(self.directory / CONFIG_FILE))
        return load_described_config(self.checkpoint)

    def config_in_place(self) -> RLTrainConfig:
        """The stored config, for the place where the run lies now: it may have been moved, and have another name."""
        config = self.stored_config()
        for exp_name in (config.exp_name, self.directory.name):
            names = pathlib.PurePath(config.name, exp_name).parts
            if self.directory.parts[-len(names) :] == names:
                above = str(self.directory.parents[len(names) - 1])
                return apply_config_overrides(config, {"checkpoints.directory": above, "exp_name": exp_name})
        raise ConfigError(
            f"{self.directory} holds a run of the config {config.name}, which lies in <checkpoints>/{config.name}/"
            "<exp_name>: move it to such a place, or start a new run from it with --branch_from"
        )


def find_starting_point(path: str | pathlib.Path, flag: str) -> StartingPoint:
    """The run and the step that a path means: DIR or DIR/STEP. `flag` is the flag that was given the path."""
    if is_hub_address(path):
        raise ConfigError(
            f"{flag}: a run goes on from its own directory; found {path}. --load critics,policy {path} starts a new "
            "run with the policy and the critics of the hub"
        )
    given = pathlib.Path(path).expanduser().absolute()
    if (given / RUN / RUN_FILE).is_file() and is_whole_number(given.name):
        return StartingPoint(given.parent, int(given.name))
    if (problem := _other_kind(given)) is not None:
        raise ConfigError(f"{flag}: {given} {problem}")
    if (given / CONFIG_FILE).is_file() or saved_steps(given):
        return StartingPoint(given, None)
    if is_whole_number(given.name) and (given.parent / CONFIG_FILE).is_file():
        raise ConfigError(f"{flag}: {missing_step(given.parent, int(given.name))}")
    what = "is neither a run nor one of its checkpoints" if given.exists() else "does not exist"
    raise ConfigError(f"{flag}: {given} {what}; expected a run, <checkpoints>/<config>/<exp_name>, or <run>/<step>")


def missing_step(directory: pathlib.Path, step: int) -> str:
    """That a run has no checkpoint of a step, and which checkpoints the run has."""
    steps = ", ".join(map(str, saved_steps(directory))) or "none"
    return f"{directory} has no checkpoint of step {step}; the steps of its checkpoints: {steps}"


def _other_kind(directory: pathlib.Path) -> str | None:
    """What a directory is that holds a policy, but not the state of a run; None for every other directory."""
    if (directory / EXPORT_FILE).is_file():
        kind = "is an export"
    elif (directory / PARTS_FILE).is_file():
        kind = "holds parts of a checkpoint"
    elif any((place / "_METADATA").is_file() for place in (directory, directory / PARAMS)):
        kind = "is a checkpoint of openpi"
    else:
        return None
    return (
        f"{kind}, without the state of training: a run cannot go on from there. `--load policy {directory}` starts a "
        "new run with its weights"
    )
