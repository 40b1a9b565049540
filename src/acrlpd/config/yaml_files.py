"""Configs as YAML files: experiment files that change a preset, and the complete config saved with a run.

    base_config: droid        # a preset; the rest changes it
    training:
      offline_steps: 1800000
    critic:
      num_critics: 12

Mistakes are reported with file and line.
"""

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from flax.traverse_util import unflatten_dict

from acrlpd.config.overrides import Assignment, assign
from acrlpd.config.registry import list_configs, load_training_config
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError, describe_changes, diff_configs, to_dict
from acrlpd.text import printable

_COMMENT_WIDTH = 110


class ConfigLoader(yaml.SafeLoader):
    """YAML in which 2e-5 is a number; YAML 1.1 would read text, because it wants 2.0e-5."""


class ConfigDumper(yaml.SafeDumper):
    """Writes what `ConfigLoader` reads: text such as 2e-5, which may be the name of a run, gets quotes."""


for _class in (ConfigLoader, ConfigDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def config_to_yaml(config: RLTrainConfig) -> str:
    """The complete config as text; `parse_config` gives the same config back."""
    return yaml.dump(to_dict(config), Dumper=ConfigDumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: RLTrainConfig, path: str | pathlib.Path) -> None:
    pathlib.Path(path).write_text(config_to_yaml(config), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value in an experiment file, and what the file says about it."""

    value: Any
    comment: str = ""


def settings_to_yaml(settings: Mapping[str, Setting], header: Sequence[str]) -> str:
    """An experiment file that sets fields by dotted name; each text of the header is a paragraph of comments."""
    paragraphs = [_comment(text, "") for text in header]
    tree = unflatten_dict(dict(settings), sep=".")
    return "\n#\n".join(paragraphs) + "\n" + "\n".join(_setting_lines(tree)) + "\n"


def _setting_lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Values first, then sections, each in its order; a section at the top stands apart."""
    for name, content in sorted(tree.items(), key=lambda item: not isinstance(item[1], Setting)):
        if isinstance(content, Setting):
            if content.comment:
                yield _comment(content.comment, indent)
            value = yaml.dump(
                content.value,
                Dumper=ConfigDumper,
                default_flow_style=True,
                allow_unicode=True,
                sort_keys=False,
                width=10_000,
            )
            value = value.removesuffix("...\n").rstrip()  # the end of a document
            yield f"{indent}{name}: {value}"
        else:
            if not indent:
                yield ""
            yield f"{indent}{name}:"
            yield from _setting_lines(content, indent + "  ")


def _comment(text: str, indent: str) -> str:
    """The text as lines of comment. It may repeat names of a dataset, which must not end the comment."""
    return textwrap.fill(
        " ".join(printable(text).split()), _COMMENT_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def load_config(path: str | pathlib.Path) -> RLTrainConfig:
    """Reads an experiment file (`base_config:` and sections) or a complete config."""
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    return parse_config(text, str(path))


def require_same_config(file: pathlib.Path, config: RLTrainConfig, what: str, fix: str) -> None:
    """Refuses to go on with another config than that in `file`; `what` says what the directory of `file` holds."""
    if changes := diff_configs(load_config(file), config):
        raise ConfigError(f"{file.parent} holds {what} of another config:\n{describe_changes(changes)}\n{fix}")


def parse_config(text: str, file_name: str = "<yaml>") -> RLTrainConfig:
    """As `load_config`, from text; `file_name` appears in errors."""
    expected = "`base_config: <preset>` and sections, or a complete config"
    return assign(*_split_base(parse_assignments(text, file_name, expected), file_name))


def parse_assignments(text: str, file_name: str, expected: str) -> list[Assignment]:
    """Every scalar and list of a YAML file by dotted name; `expected` says in an error what the file should hold."""
    try:
        node = yaml.compose(text, Loader=ConfigLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file_name}:{line}: not valid YAML: {error.problem} {error.context or ''}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file_name} is not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file_name} must hold {expected}")
    assignments = list(_leaves(node, file_name))
    # A field can be written nested, dotted or by a short name. If it is written twice, the file contradicts itself.
    first: dict[str, Assignment] = {}
    for assignment in assignments:
        other = first.setdefault(assignment.path, assignment)
        if other is not assignment:
            raise ConfigError(assignment.error(f"{assignment.key} is given twice: {other.key} at {other.where}"))
    return assignments


def _split_base(assignments: list[Assignment], file_name: str) -> tuple[RLTrainConfig, list[Assignment]]:
    """The config that the file starts from, and the assignments that change it."""
    special = {a.key: a for a in assignments if a.key in ("base_config", "platform", "environment")}
    rest = [a for a in assignments if a.key not in special]
    base, environment = special.get("base_config", special.get("platform")), special.get("environment")
    if base is None:
        name = next((a for a in rest if a.key == "name"), None)
        if name is None:
            raise ConfigError(f"{file_name}: base_config is missing; name the preset to start from")
        if environment is not None:
            raise ConfigError(environment.error("environment changes a preset; base_config is missing"))
        return RLTrainConfig(name=str(name.value)), rest
    preset, platform = str(base.value), str(special.get("platform", base).value)
    if preset != platform:
        raise ConfigError(f"{file_name}: platform {platform} and base_config {preset} name two presets; keep one")
    mistake_at = base if environment is None or preset not in list_configs() else environment
    try:
        return load_training_config(preset, "production" if environment is None else str(environment.value)), rest
    except ConfigError as error:
        raise ConfigError(mistake_at.error(str(error))) from error


def _leaves(node: yaml.MappingNode, file_name: str, prefix: str = "", *around: yaml.Node) -> Iterator[Assignment]:
    """Every scalar and list of a mapping, by dotted name, with its line; `around` are the mappings around it."""
    for key_node, value_node in node.value:
        where = f"{file_name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: keys must be names")
        key = prefix + key_node.value
        if any(value_node is outer for outer in (node, *around)):
            raise ConfigError(f"{where}: {key} is an alias of a section around it")
        if isinstance(value_node, yaml.MappingNode):
            yield from _leaves(value_node, file_name, f"{key}.", node, *around)
        else:
            try:
                value = ConfigLoader("").construct_object(value_node, deep=True)
            except (yaml.YAMLError, ValueError) as error:  # an unknown tag, or a date that does not exist
                problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
                raise ConfigError(f"{where}: the value of {key} cannot be read: {problem}") from error
            yield Assignment(key, value, where)
