"""The options of a run, which say how to run; the config says what to run."""

import dataclasses

from acrlpd.config.command_line import Flag


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run. The comments are the help of the command."""

    # Train a run with each of these seeds, all in one program; their names are <exp_name>-seed<seed>.
    seeds: tuple[int, ...] = ()
    # Train a run for each of these tasks, all in one program: {task} in fields of the config becomes the task's name.
    tasks: tuple[str, ...] = ()
    # Continue the run of this name from its newest complete checkpoint.
    resume: Flag = False
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
