"""Help for a command line with hundreds of flags: the ones people use first, then the rest by topic.

`--help` shows the first flags, `--help run` the command's own options and the short names, `--help SECTION` the flags
of a section of the config, and `--help all` everything.
"""

import dataclasses
import functools
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

import tyro

from acrlpd.choice import hint
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, is_section

ALL, RUN = "all", "run"
_NOT_SHOWN: Any = tyro.conf.Suppress  # The types that it is applied to are known at run time only.


def sections() -> list[str]:
    """The sections of a config, each a topic of help."""
    return [name for name, kind in typing.get_type_hints(RLTrainConfig).items() if is_section(kind)]


def find_topic(args: Sequence[str]) -> str | None:
    """What help is asked for: "" for the first flags, or a topic; None: no help is asked for."""
    asked = next((i for i, arg in enumerate(args) if arg in ("-h", "--help")), None)
    if asked is None:
        return None
    topic = next((arg for arg in args[asked + 1 : asked + 2] if not arg.startswith("-")), "")
    topic = topic.replace("-", "_")
    known = [RUN, *sections(), ALL]
    if topic and topic not in known:
        raise ConfigError(f"unknown topic of help {topic!r}{hint(topic, known)}\nknown: {', '.join(known)}")
    return topic


def describe_topics() -> str:
    """What else one can ask for, as the end of a description."""
    named = textwrap.fill(", ".join(sections()), 76, initial_indent="    ", subsequent_indent="    ")
    return (
        "These are the flags that people use first; with --config NAME, their values are those of that config.\n"
        f"  --help {RUN}      the other options of the command, and short names\n"
        f"  --help SECTION  the flags of a section of the config:\n{named}\n"
        f"  --help {ALL}      all flags"
    )


def without(options: type, hidden: Collection[str], values: Any = None) -> type:
    """The dataclass `options` with some flags left out of the help; `values` has defaults in place of its own.

    tyro reads the help from the comments in the source, and looks for the source by module and name of the class.
    """
    hints = typing.get_type_hints(options, include_extras=True)
    fields: list[Any] = []
    for field in dataclasses.fields(options):
        kind = _NOT_SHOWN[hints[field.name]] if field.name in hidden else hints[field.name]
        default = dataclasses.field(default=field.default, default_factory=field.default_factory)
        if values is not None:
            default = dataclasses.field(default_factory=functools.partial(getattr, values, field.name))
        fields.append((field.name, kind, default))
    same_source = {"__module__": options.__module__, "__qualname__": options.__qualname__}
    return dataclasses.make_dataclass(options.__name__, fields, bases=(options,), namespace=same_source, frozen=True)
