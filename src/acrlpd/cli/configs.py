"""`acrlpd configs`: list, show and compare."""

import json
from typing import Annotated

import tyro

from acrlpd.config.command_line import find_config
from acrlpd.config.registry import describe_config, list_configs
from acrlpd.config.tree import config_hash, diff_configs, to_dict
from acrlpd.config.validation import validate_config
from acrlpd.config.yaml_files import config_to_yaml

Name = Annotated[str, tyro.conf.Positional]


def list_(json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """List all presets.

    Args:
        json_: Print JSON.
    """
    configs = list_configs()
    if json_:
        print(json.dumps(configs, indent=2))
        return
    width = max(map(len, configs))
    for name, description in configs.items():
        print(f"{name:<{width}}  {description}")


def show(
    name: Name, environment: str = "production", json_: Annotated[bool, tyro.conf.arg(name="json")] = False
) -> None:
    """Show a preset or a YAML file completely, with what validation has to say.

    Args:
        name: A preset or a YAML file.
        environment: production, development or debug; for presets.
        json_: Print JSON.
    """
    config = find_config(name, environment)
    validation = validate_config(config)
    if json_:
        result = {
            "config": to_dict(config),
            "hash": config_hash(config),
            "errors": validation.errors,
            "warnings": validation.warnings,
        }
        print(json.dumps(result, indent=2))
        return
    if name in list_configs():
        print(_commented(describe_config(name)) + "\n")
    print(config_to_yaml(config))
    print(f"# hash: {config_hash(config)}")
    for kind, messages in (("error", validation.errors), ("warning", validation.warnings)):
        for message in messages:
            print(f"# {kind}: {message}")


def diff(first: Name, second: Name, json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Show the fields in which two presets or YAML files differ.

    Args:
        first: A preset or a YAML file.
        second: A preset or a YAML file.
        json_: Print JSON.
    """
    differences = diff_configs(find_config(first), find_config(second))
    if json_:
        print(json.dumps({key: {"first": a, "second": b} for key, (a, b) in differences.items()}, indent=2))
        return
    if not differences:
        print("no difference")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for column in ("field", first, second):
        table.add_column(Text(column), overflow="fold")
    for key, values in differences.items():
        table.add_row(key, *(Text(_short(value)) for value in values))  # a path with brackets is no markup
    Console().print(table)


def _short(value: object) -> str:
    return "-" if value is None else str(value)


def _commented(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


COMMANDS = {"list": list_, "show": show, "diff": diff}
