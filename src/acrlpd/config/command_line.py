"""Choosing and changing a config on the command line.

`--config` names a preset or a YAML file; every field of the config is a flag (`--critic.num-critics 4`),
the usual ones also under a short name (`--critic_lr 1e-3`). Dashes and underscores are the same.
"""

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import tyro

from acrlpd.choice import kind_names
from acrlpd.config.environments import load_training_config
from acrlpd.config.overrides import apply_config_overrides, families, resolve_alias
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, diff_configs, flatten, to_dict
from acrlpd.config.yaml_files import load_config

Options = TypeVar("Options")
# A switch that is off unless given.
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

# Short names that are more than another name for one field.
_NOT_PLAIN = ("config", "environment", "max_steps", "no_wandb", "pi0_lr", "critic_lr", "async_actor")


@dataclasses.dataclass(frozen=True)
class ConfigFlags:
    """Which config, and short names for what is changed most."""

    # Name of a preset (`acrlpd configs list`), or a YAML file.
    config: str
    # production, development (shorter, evaluates more) or debug (very short); for presets.
    environment: str = "production"
    # At most this many updates, offline first, then online.
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


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A command without options of its own."""


def parse_config_args(
    options: type[Options], args: Sequence[str] | None = None, *, prog: str | None = None, description: str
) -> tuple[RLTrainConfig, Options]:
    """Parses config flags together with a command's own options.

    Help without `--config` shows the options and short names only; with it, every field and its value.
    """
    args = list(sys.argv[1:] if args is None else args)
    name = _peek(args, "--config")
    if name is None:
        if not any(arg in ("-h", "--help") for arg in args):
            raise ConfigError("--config is missing: give a preset (`acrlpd configs list`) or a YAML file")
        description += "\n\nEvery field of the config is a flag too: `--config NAME --help` lists them."
        _parse(args, prog, description, own=options, flags=ConfigFlags)
    assert name is not None
    chosen, args = _take_choices(args)
    base = apply_config_overrides(find_config(name, _peek(args, "--environment") or "production"), chosen)
    description += "\n\nSections of which there are several kinds, or your own as module:Name:\n" + _describe_choices()
    parsed = _parse(args, prog, description, default=base, own=options, flags=ConfigFlags, fields=RLTrainConfig)
    fields, flags = parsed["fields"], parsed["flags"]
    # All at once: what was not given may depend on what was.
    config = apply_config_overrides(base, _given_fields(args, base, fields) | _flag_changes(fields, flags))
    return config if flags.max_steps is None else limit_steps(config, flags.max_steps), parsed["own"]


def _parse(
    args: Sequence[str],
    prog: str | None,
    description: str,
    default: RLTrainConfig | None = None,
    **parts: type,
) -> dict[str, Any]:
    """One flat command line from several dataclasses."""

    def collect(**values: Any) -> dict[str, Any]:
        return values

    parameters = [
        inspect.Parameter(
            part,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[cls, tyro.conf.arg(name="")],
            default=default if part == "fields" else inspect.Parameter.empty,
        )
        for part, cls in parts.items()
    ]
    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    collect.__annotations__ = {p.name: p.annotation for p in parameters}
    return tyro.cli(collect, args=args, prog=prog, description=description, config=(tyro.conf.AvoidSubcommands,))


def find_config(name: str, environment: str = "production") -> RLTrainConfig:
    """A preset by name, or a YAML file by path."""
    if name.endswith((".yaml", ".yml")) or "/" in name or pathlib.Path(name).is_file():
        if environment != "production":
            raise ConfigError("--environment is for presets; in a file write `environment:`")
        return load_config(name)
    return load_training_config(name, environment)


def _given_fields(args: Sequence[str], base: RLTrainConfig, parsed: RLTrainConfig) -> dict[str, Any]:
    """The fields that were written, by dotted name, also those that were given the value which `base` has.

    Such a value is no difference, but it is a decision: nothing that follows from other fields may replace it.
    """
    written = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    changed = diff_configs(base, parsed)

    def is_given(name: str) -> bool:
        section, dot, leaf = name.rpartition(".")
        return name in changed or name in written or f"{section}{dot}no_{leaf}" in written

    return {name: value for name, value in flatten(to_dict(parsed)) if is_given(name)}


def _flag_changes(config: RLTrainConfig, flags: ConfigFlags) -> dict[str, Any]:
    """What the short names say, but for max_steps; `config` has the learning rates' schedules."""
    changes: dict[str, Any] = {
        name: value for name, value in dataclasses.asdict(flags).items() if value is not None and name not in _NOT_PLAIN
    }
    if flags.pi0_lr is not None:
        scaled = config.actor_lr_schedule.scaled_to(flags.pi0_lr)
        changes |= {f"actor_lr_schedule.{name}": value for name, value in scaled.items()}
    if flags.critic_lr is not None:
        scaled = config.critic_lr_schedule.scaled_to(flags.critic_lr)
        changes |= {f"critic_lr_schedule.{name}": value for name, value in scaled.items()}
    if flags.no_wandb:
        changes["logging.wandb"] = "disabled"
    if flags.async_actor:
        changes["online.async_actor"] = True
    return changes


def limit_steps(config: RLTrainConfig, max_steps: int) -> RLTrainConfig:
    """Ends the run after `max_steps` updates: the offline phase first, what is left is online."""
    if max_steps < 1:
        raise ConfigError(f"--max_steps must be at least 1; found {max_steps}")
    offline = min(config.training.offline_steps, max_steps)
    online = min(config.training.online_steps, max_steps - offline)
    return apply_config_overrides(config, offline_steps=offline, online_steps=online)


def _take_choices(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The sections whose class the command line names, such as `--improvement best_of_n`, and the other arguments.

    They are taken before the real parse, because the class of a section decides which flags the section has.
    """
    chosen: dict[str, str] = {}
    rest: list[str] = []
    values = iter(args)
    for arg in values:
        flag, equals, value = arg.partition("=")
        section = resolve_alias(flag.removeprefix("--").replace("-", "_"))
        if not flag.startswith("--") or section not in families():
            rest.append(arg)
            continue
        value = value if equals else next(values, "")
        if not value:
            raise ConfigError(f"{flag} needs a name: {', '.join(kind_names(families()[section]))}, or module:Name")
        chosen[section] = value
    return chosen, rest


def _describe_choices() -> str:
    return "\n".join(f"--{section} {{{','.join(kind_names(family))}}}" for section, family in families().items())


def _peek(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before the real parse, which depends on it; given twice, the last one counts there too."""
    value = None
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"{flag}="):
            value = arg.partition("=")[2]
    return value
