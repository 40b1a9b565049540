"""Choosing and changing a config on the command line.

`--config` names a preset or a YAML file; every field of the config is a flag (`--critic.num-critics 4`),
the usual ones also under a short name (`--critic_lr 1e-3`). Dashes and underscores are the same. The flags of the seed
documents are other names (`flag_names.py`).
"""

import dataclasses
import difflib
import itertools
import operator
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from acrlpd.choice import hint, kind_name, kind_names
from acrlpd.config import command_help
from acrlpd.config.flag_names import (
    describe_seed_flags,
    field_of,
    flag_name,
    refuse_unknown_flags,
    replace_seed_flags,
)
from acrlpd.config.overrides import ALIASES, apply_config_overrides, resolve_alias
from acrlpd.config.registry import load_training_config
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, families, flatten, to_dict
from acrlpd.config.yaml_files import load_config
from acrlpd.text import parse_arguments

Options = TypeVar("Options")
# A switch that is off unless given.
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

# Parts of a checkpoint that another run can start with.
_PARTS = (POLICY, CRITICS) = "policy", "critics"


@dataclasses.dataclass(frozen=True)
class ConfigFlags:
    """Which config, and short names for what is changed most."""

    # Name of a preset (`acrlpd configs list`), or a YAML file.
    config: str
    # production, development (shorter, evaluates more) or debug (very short); for presets.
    environment: str = "production"
    # Updates of the run in all: offline first, then online. A phase whose own length is given as well gets no longer.
    max_steps: int | None = None
    # Updates on the dataset alone.
    offline_steps: int | None = None
    # Updates while the policy acts in the environment.
    online_steps: int | None = None
    # Peak learning rate of the policy; the end of a cosine moves in proportion.
    pi0_lr: float | None = None
    # Peak learning rate of the critics; the end of a cosine moves in proportion.
    critic_lr: float | None = None
    # Weight of behaviour cloning.
    bc_weight: float | None = None
    # Candidates per observation.
    best_of_n_samples: int | None = None
    # Start with parts of another run: "policy", "critics" or "critics,policy", and the directory of the run, of a
    # checkpoint, of an export or of extracted parts.
    load: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="PARTS DIR")] = None
    # Devices that share one copy of the large arrays.
    fsdp_devices: int | None = None
    # Micro-batches per update.
    gradient_accumulation_steps: int | None = None
    # Where runs are kept.
    checkpoint_dir: str | None = None
    # LeRobot dataset on the hub.
    lerobot_repo_id: str | None = None
    # Local dataset directory.
    data_dir: str | None = None
    # Let an actor process play while the learner trains: online.async_actor.
    async_actor: Annotated[Flag, tyro.conf.arg(name="async")] = False
    # Do not use Weights & Biases.
    no_wandb: Flag = False


# Short names that help does not show first.
_RARE_FLAGS = (
    "environment",
    "critic_lr",
    "load",
    "fsdp_devices",
    "gradient_accumulation_steps",
    "async_actor",
    "no_wandb",
)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Choose and change a config."""


def cli(args: Sequence[str] | None = None) -> RLTrainConfig:
    """The config that the command line asks for: `--config NAME` and any overrides."""
    return parse_config_args(NoOptions, args)[0]


def parse_config_args(
    options: type[Options],
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    rare: Collection[str] = (),
    stored: RLTrainConfig | None = None,
) -> tuple[RLTrainConfig, Options]:
    """Parses config flags together with a command's own options, whose docstring is the description in the help.

    Options that are `rare` are not among the flags that help shows first. `stored` is the config where --config is
    missing.
    """
    args = replace_seed_flags(sys.argv[1:] if args is None else args)
    topic = command_help.find_topic(args)
    # These flags decide which other flags exist, so they are read before the real parse.
    first = _peek(args, ("config", "environment", *families()))
    if "config" in first:
        base = find_config(first.pop("config"), first.pop("environment", "production"))
    elif stored is not None:
        if "environment" in first:
            raise ConfigError("--environment is for presets: give --config as well")
        base, args = stored, [*args, "--config", stored.name]  # The real parse wants the flag.
    elif topic is None:
        given = difflib.get_close_matches("--config", [arg.partition("=")[0] for arg in args], n=1)
        misspelt = f" (found {given[0]})" if given else ""
        raise ConfigError(f"--config is missing{misspelt}: give a preset (`acrlpd configs list`) or a YAML file")
    else:
        base = RLTrainConfig(name="")
    base = apply_config_overrides(base, first)
    if topic is not None:
        _show_help(topic, options, prog, base, rare)
    refuse_unknown_flags(args, base, (options, ConfigFlags))
    parts = {"own": options, "flags": ConfigFlags, "kinds": _kind_flags(base), "fields": RLTrainConfig}
    parsed = _parse(args, prog, parts, default=base)
    # All changes at once: fields that were not given may change with those that were.
    changes = _given_fields(args, parsed.fields) | _flag_changes(parsed.fields, parsed.flags)
    config = apply_config_overrides(base, changes)
    if parsed.flags.max_steps is not None:
        config = set_max_steps(config, parsed.flags.max_steps, given={resolve_alias(name) for name in changes})
    return config, parsed.own


def _show_help(topic: str, options: type, prog: str | None, base: RLTrainConfig, rare: Collection[str]) -> NoReturn:
    """Prints help about a topic with the values of `base`, and ends the process."""
    description, default = options.__doc__ or "", None
    if topic == command_help.ALL:
        parts = {"own": options, "flags": ConfigFlags, "kinds": _kind_flags(base), "fields": RLTrainConfig}
        default = base
    elif topic == command_help.RUN:
        description += f"\n\n{describe_seed_flags()}"
        parts = {"own": options, "flags": ConfigFlags, "kinds": _kind_flags(base)}
    elif topic:
        default = getattr(base, topic)
        parts = {topic: type(default)}
    else:
        description += f"\n\n{command_help.describe_topics()}"
        parts = {
            "own": command_help.without(options, rare),
            "flags": command_help.without(ConfigFlags, _RARE_FLAGS),
            "fields": command_help.without(RLTrainConfig, {"name", *command_help.sections()}, base),
        }
    _parse(["--help"], prog, parts, description=description, default=default)
    raise AssertionError("tyro ends the process after help")


def _parse(
    args: Sequence[str],
    prog: str | None,
    parts: Mapping[str, type],
    *,
    description: str = "",
    default: Any = None,
) -> Any:
    """One flat command line from several dataclasses; the result has an attribute for each of them.

    The last one may have a default. A part that is a section of the config keeps its name in its flags.
    """
    fields: list[Any] = [
        (name, cls if name in command_help.sections() else Annotated[cls, tyro.conf.arg(name="")])
        for name, cls in parts.items()
    ]
    if default is not None:
        fields[-1] += (dataclasses.field(default=default),)
    together = dataclasses.make_dataclass("CommandLine", fields)
    return parse_arguments(
        together, args=args, prog=prog, description=description, config=(tyro.conf.AvoidSubcommands,)
    )


def _kind_flags(config: RLTrainConfig) -> type:
    """A flag for each section that is one of several classes; `config` says which classes its sections are now."""
    fields: list[Any] = []
    for section, family in families().items():
        kinds = "|".join([*kind_names(family), "module:Name"])
        flag = tyro.conf.arg(name=section, metavar=kinds, help=f"Kind of {section}: one of ours, or your own.")
        chosen = kind_name(operator.attrgetter(section)(config))
        fields.append((section.replace(".", "_"), Annotated[str | None, flag], dataclasses.field(default=chosen)))
    return dataclasses.make_dataclass("KindsOfSections", fields)


def find_config(name: str, environment: str = "production") -> RLTrainConfig:
    """A preset by name, or a YAML file by path."""
    if name.endswith((".yaml", ".yml")) or "/" in name or pathlib.Path(name).is_file():
        if environment != "production":
            raise ConfigError("--environment is for presets; in a file write `environment:`")
        return load_config(name)
    return load_training_config(name, environment)


def _given_fields(args: Sequence[str], parsed: RLTrainConfig) -> dict[str, Any]:
    """The values of the fields that were written, by dotted name.

    A field may be written with the value that it has already. It is still given: no other field may change it.
    """
    written = set(map(field_of, filter(None, map(flag_name, args))))
    return {name: value for name, value in flatten(to_dict(parsed)) if name in written}


def _flag_changes(config: RLTrainConfig, flags: ConfigFlags) -> dict[str, Any]:
    """The changes that the short names stand for, without max_steps; `config` has the schedules to scale."""
    changes = {name: value for name, value in vars(flags).items() if name in ALIASES and value is not None}
    for section, peak_lr in (("actor_lr_schedule", flags.pi0_lr), ("critic_lr_schedule", flags.critic_lr)):
        if peak_lr is not None:
            scaled = getattr(config, section).scaled_to(peak_lr)
            changes |= {f"{section}.{name}": value for name, value in scaled.items()}
    if flags.load is not None:
        changes |= _loaded_parts(*flags.load)
    if flags.no_wandb:
        changes["logging.wandb"] = "disabled"
    if flags.async_actor:
        changes["online.async_actor"] = True
    return changes


def parse_parts(text: str, flag: str) -> tuple[str, ...]:
    """The names of parts of a checkpoint in a text such as "critics,policy"."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in _PARTS]:
        raise ConfigError(
            f"{flag}: {unknown[0]!r} is no part of a checkpoint{hint(unknown[0], _PARTS)}; the parts are "
            f"{', '.join(_PARTS)}, with a comma and no space between them"
        )
    return names


def _loaded_parts(parts: str, directory: str) -> dict[str, Any]:
    """The fields that `--load PARTS DIR` stands for."""
    fields = {
        POLICY: {"weight_loader.kind": "checkpoint", "weight_loader.path": directory},
        CRITICS: {"weight_loader.critics": directory},
    }
    return {field: value for name in parse_parts(parts, "--load") for field, value in fields[name].items()}


def set_max_steps(config: RLTrainConfig, max_steps: int, given: Collection[str] = ()) -> RLTrainConfig:
    """The run with `max_steps` updates in all: offline updates first, then online updates.

    A longer run than that of the config has a longer last phase, if there is an environment for it; the lengths of
    phases that are `given` by dotted name stay. Learning-rate schedules keep their own lengths.
    """
    if max_steps < 1:
        raise ConfigError(f"--max_steps must be at least 1; found {max_steps}")
    steps = {"offline_steps": min(config.training.offline_steps, max_steps)}
    steps["online_steps"] = min(config.training.online_steps, max_steps - steps["offline_steps"])
    phases = ("online_steps", "offline_steps") if config.env.id is not None else ("offline_steps",)
    growing = [phase for phase in phases if steps[phase] > 0 and f"training.{phase}" not in given]
    if growing:
        steps[growing[0]] += max_steps - sum(steps.values())
    return apply_config_overrides(config, steps)


def _peek(args: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """The values of some flags. If a flag is given twice, the last one counts, as in the real parse."""
    found: dict[str, str] = {}
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
        name, (flag, equals, value) = flag_name(arg), arg.partition("=")
        if name is not None and name in names:
            if not equals and following.startswith("--"):
                kinds = f": {', '.join(kind_names(families()[name]))}, or module:Name" if name in families() else ""
                raise ConfigError(f"{flag} needs a value{kinds}")
            found[name] = value if equals else following
    return found
