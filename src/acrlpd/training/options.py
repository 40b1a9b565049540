"""The options of a run, which say how to run; the config says what to run."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from acrlpd.config.command_line import Flag


def _read_resume(given: Sequence[str]) -> str | bool:
    if len(given) > 1:
        raise ValueError(f"expected one run or step, found {' '.join(given)}")
    return given[0] if given else True


# A flag that may have a value.
Resume = Annotated[
    str | bool,
    tyro.conf.arg(help_behavior_hint=""),
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[DIR|STEP]",
        instance_from_str=_read_resume,
        is_instance=lambda value: isinstance(value, str | bool),
        str_from_instance=lambda value: [value] if isinstance(value, str) else [],
    ),
]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run. The comments are the help of the command."""

    # Train a run with each of these seeds, all in one program; their names are <exp_name>-seed<seed>.
    seeds: tuple[int, ...] = ()
    # Train a run for each of these tasks, all in one program: {task} in fields of the config becomes the task's name.
    tasks: tuple[str, ...] = ()
    # Continue the run of this name from its newest complete checkpoint, or at a step of it: newer checkpoints are set
    # aside. A directory, of a run or of one of its checkpoints, needs no --config: the run has one.
    resume: Resume = False
    # Start a new run, with a config that may be another one, from everything that a run had at a checkpoint: the
    # directory of a run (its newest checkpoint is taken) or of one of its checkpoints.
    branch_from: str | None = None
    # Remove an earlier run of this name first.
    overwrite: Flag = False
    # Prepare everything, then end without an update; nothing is written.
    dry_run: Flag = False
    # When the first step does not fit into memory, try again with more micro-batches.
    auto_batch: Flag = False
    # Fields (dotted names or sections) that may differ from the run that is resumed.
    allow_changed: tuple[str, ...] = ()
    # a:b: trace the updates after step a up to step b, and say where their time goes.
    profile_steps: str | None = None

    @property
    def resume_step(self) -> int | None:
        """The step at which runs go on; None: each run goes on at its newest checkpoint.

        The command line turns a directory into a config and a step before the runs begin.
        """
        return int(self.resume) if isinstance(self.resume, str) else None
