"""`acrlpd configs`: list, show and compare."""

import json
from typing import Annotated

import tyro
from rich.table import Table

from acrlpd.choice import kind_names
from acrlpd.cli.data import JsonFlag
from acrlpd.config.command_line import find_config
from acrlpd.config.registry import describe_config, list_configs
from acrlpd.config.tree import config_hash, diff_configs, families, to_dict
from acrlpd.config.validation import validate_config
from acrlpd.config.yaml_files import config_to_yaml
from acrlpd.console import Console
from acrlpd.text import print

Name = Annotated[str, tyro.conf.Positional]


def list_(as_json: JsonFlag = False) -> None:
    """List all presets."""
    configs = list_configs()
    if as_json:
        print(json.dumps(configs, indent=2))
        return
    width = max(map(len, configs))
    for name, description in configs.items():
        print(f"{name:<{width}}  {description}")


def show(name: Name, environment: str = "production", as_json: JsonFlag = False) -> None:
    """Show all fields of a preset or a YAML file, and what validation finds.

    The output is a complete config file: everything else is a comment.

    Args:
        name: A preset or a YAML file.
        environment: production, development or debug; for presets.
    """
    config = find_config(name, environment)
    found = validate_config(config)
    if as_json:
        content = {"config": to_dict(config), "hash": config_hash(config)}
        print(json.dumps(content | {"errors": found.errors, "warnings": found.warnings}, indent=2))
        return
    if name in list_configs():
        print(*(f"# {line}".rstrip() for line in describe_config(name).splitlines()), sep="\n", end="\n\n")
    print(config_to_yaml(config))
    print("# Sections of which there are several kinds, chosen by `type`:")
    for section, family in families().items():
        print(f"#   {section}: {', '.join(kind_names(family))}, or module:Name of your own")
    print(f"# hash: {config_hash(config)}")
    for kind, messages in (("error", found.errors), ("warning", found.warnings)):
        for message in messages:
            print(f"# {kind}: {message}")


def diff(first: Name, second: Name, as_json: JsonFlag = False) -> None:
    """Show the fields in which two presets or YAML files differ.

    Args:
        first: A preset or a YAML file.
        second: A preset or a YAML file.
    """
    differences = diff_configs(find_config(first), find_config(second))
    if as_json:
        print(json.dumps({key: {"first": a, "second": b} for key, (a, b) in differences.items()}, indent=2))
        return
    if not differences:
        print("no difference")
        return
    table = Table(box=None, header_style="bold")
    for column in ("field", first, second):
        table.add_column(column, overflow="fold")
    for key, values in differences.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    Console().print(table)


COMMANDS = {"list": list_, "show": show, "diff": diff}
