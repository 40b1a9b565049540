"""Other names of flags: those of the seed documents, and the nearest valid name of a flag that does not exist."""

import dataclasses
import difflib
import itertools
import re
import typing
from collections.abc import Collection, Iterable, Sequence

from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, families, flatten, to_dict

# Names count as alike from this likeness on, of 1 for equal names.
_ALIKE = 0.75

# A flag of the seed documents -> what it stands for, to which the value of the flag is added.
# `--enable_fsdp`, `--override_lr_schedule` and `--resume` are options of `acrlpd train` itself.
SEED_FLAGS: dict[str, tuple[str, ...]] = {
    "experiment_name": ("--exp_name",),
    "num_steps": ("--max_steps",),
    "data_path": ("--data_dir",),
    "log_frequency": ("--training.log_frequency",),
    "eval_frequency": ("--training.eval_frequency",),
    "save_frequency": ("--training.save_frequency",),
    "save_interval": ("--training.save_frequency",),
    "early_stopping_patience": ("--training.early_stopping_patience",),
    "pi0_peak_lr": ("--pi0_lr",),
    "critic_peak_lr": ("--critic_lr",),
    "pi0_checkpoint_path": ("--weight_loader.kind", "checkpoint", "--weight_loader.path"),
    "debug_mode": ("--logging.debug",),
}


def flag_name(arg: str) -> str | None:
    """The name of a flag, with underscores and without its value; None for an argument that is no flag."""
    return arg.partition("=")[0].removeprefix("--").replace("-", "_") if arg.startswith("--") else None


def field_of(flag: str) -> str:
    """The field that a flag sets: --model.no-pi05 sets model.pi05."""
    return re.sub(r"\bno_(?=\w+$)", "", flag)


def replace_seed_flags(args: Iterable[str]) -> list[str]:
    """The arguments with our own names in place of the seeds' names."""
    replaced: list[str] = []
    for arg in args:
        meant = SEED_FLAGS.get(flag_name(arg) or "")
        value = arg.partition("=")[2:] if "=" in arg else ()
        replaced += [arg] if meant is None else [*meant, *value]
    return replaced


def describe_seed_flags() -> str:
    """The table for people who ask for help."""
    width = max(map(len, SEED_FLAGS))
    lines = (f"  --{name:<{width}}  {' '.join(meant)}" for name, meant in SEED_FLAGS.items())
    return "\n".join(["Other names:", *lines])


def refuse_unknown_flags(args: Sequence[str], config: RLTrainConfig, options: Iterable[type]) -> None:
    """Raises an error that names the nearest valid flags of a flag that does not exist.

    A flag that is like no valid flag is left to the parser, which refuses it.
    """
    known = known_flags(config, options)
    problems = [
        f"unknown flag --{name}; did you mean {' or '.join(f'--{flag}' for flag in nearest)}?"
        for name in filter(None, map(flag_name, args))
        if name not in known and field_of(name) not in known and (nearest := _nearest(name, known))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def known_flags(config: RLTrainConfig, options: Iterable[type]) -> set[str]:
    """The names of the flags of a command with these options, for a config of these kinds of sections."""
    own = itertools.chain.from_iterable(map(_option_names, options))
    return {*own, *families(), *(name for name, _ in flatten(to_dict(config))), *SEED_FLAGS, "help"}


def _option_names(options: type) -> Iterable[str]:
    """The flags of a dataclass of options. tyro may give a field another name than the field has."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        marks = getattr(hints[field.name], "__metadata__", ())
        yield next((mark.name for mark in marks if getattr(mark, "name", None)), field.name)


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """Up to three valid flags that are written alike, as a whole or in their last part; the nearest come first."""
    likeness = {flag: max(_likeness(name, flag), _likeness(_leaf(name), _leaf(flag))) for flag in known}
    best = max(likeness.values())
    close = [flag for flag in sorted(known) if likeness[flag] >= max(best - 0.02, _ALIKE)]
    return sorted(close, key=lambda flag: -_likeness(name, flag))[:3]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
