"""Several runs from one command: a config for each seed and each task, in one program.

The runs of `--seeds` differ in their seed. The runs of `--tasks` differ in every field that contains the text `{task}`:
for tasks that share transitions, these are the environment and the column of rewards.
"""

import collections
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, to_dict
from acrlpd.config.tree import NOT_HASHED, flatten
from acrlpd.training.options import RunOptions

TASK = "{task}"


def create_members(rl_config: RLTrainConfig, options: RunOptions) -> list[RLTrainConfig]:
    """The config of each run that the options ask for: one run, unless they name seeds or tasks."""
    _refuse_twice("--seeds", options.seeds)
    _refuse_twice("--tasks", options.tasks)
    values = dict(flatten(to_dict(rl_config)))
    fields = [name for name, value in values.items() if _has_task(value)]
    if "exp_name" in fields:
        raise ConfigError(f"exp_name contains {TASK}: leave {TASK} out, because --tasks adds the name of the task")
    if fields and not options.tasks:
        raise ConfigError(f"{fields[0]} contains {TASK}: name the tasks with --tasks")
    if options.tasks and not any(name.split(".")[0] not in NOT_HASHED for name in fields):
        raise ConfigError(
            f"--tasks: no field that changes what is trained contains {TASK}, so all runs would be the same; write "
            f"{TASK} where the name of the task belongs, for example in env.id and data.rewards.reward_column"
        )
    members = []
    for task, seed in itertools.product(options.tasks or (None,), options.seeds or (None,)):
        parts = [rl_config.exp_name, task, None if seed is None else f"seed{seed}"]
        changes: dict[str, Any] = {"exp_name": "-".join(part for part in parts if part is not None)}
        if seed is not None:
            changes["seed"] = seed
        if task is not None:  # All fields are given: data.repo_id alone would take data.data_dir away.
            changes = values | {name: _fill(values[name], task) for name in fields} | changes
        members.append(apply_config_overrides(rl_config, changes))
    if len(members) > 1:
        _check_together(rl_config, options)
    return members


def joint_name(rl_config: RLTrainConfig, options: RunOptions) -> str:
    """The name of what the runs have in common, for their joint report."""
    return f"{rl_config.exp_name}-{'tasks' if options.tasks else 'seeds'}"


def _check_together(rl_config: RLTrainConfig, options: RunOptions) -> None:
    """Refuses what only a run alone can do."""
    alone = "Train the runs one by one, with --seed"
    problems = (
        (rl_config.online.async_actor, "online.async_actor: an actor process plays for one run"),
        (rl_config.logging.debug, "logging.debug looks at the updates of one run"),
        (options.profile_steps is not None, "--profile_steps looks at the updates of one run"),
        (jax.process_count() > 1, "several runs in one program need a single process"),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise ConfigError(f"--seeds and --tasks: {problem}. {alone}")


def _refuse_twice(flag: str, values: Sequence[Hashable]) -> None:
    twice = [value for value, count in collections.Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(f"{flag}: {twice[0]} is given twice; both runs would write to one directory")


def _has_task(value: Any) -> bool:
    return TASK in value if isinstance(value, str) else isinstance(value, list | tuple) and any(map(_has_task, value))


def _fill(value: Any, task: str) -> Any:
    return value.replace(TASK, task) if isinstance(value, str) else [_fill(part, task) for part in value]
