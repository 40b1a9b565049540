"""`acrlpd configs`: list, show and compare, and write one for a dataset."""

import json
import shlex
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from acrlpd.choice import kind_name, kind_names
from acrlpd.cli.data import Dataset, JsonFlag
from acrlpd.config.command_line import Flag, find_config
from acrlpd.config.registry import describe_config, list_configs
from acrlpd.config.tree import ConfigError, config_hash, diff_configs, families, to_dict
from acrlpd.config.validation import validate_config
from acrlpd.config.yaml_files import config_to_yaml
from acrlpd.console import Console
from acrlpd.files import write_text_atomically
from acrlpd.text import print

if TYPE_CHECKING:
    from acrlpd.data.tools.new_config import Devices, NewConfig

_WEIGHTS = Path("openpi")  # where the printed commands keep released weights
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


def new(dataset: Dataset, output: Path | None = None, accelerator: str | None = None, overwrite: Flag = False) -> None:
    """Look at a dataset, and write a config file that trains on it.

    Args:
        output: The file, whose name the config gets; by default `<name of the dataset>.yaml` in the present directory.
        accelerator: The accelerator that will train, for example RTX-4090, or cpu; by default that of this machine.
        overwrite: Replace the file if there is one.
    """
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.new_config import new_config

    devices = _find_devices(accelerator)
    source = open_source(dataset, on_bad_episode="skip")
    made = new_config(source, dataset, devices, output.stem if output else None)
    file = output or Path(f"{made.config.name}.yaml")
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists: replace it with --overwrite, or name another file with --output")
    validate_config(made.config, num_devices=devices.num_devices if devices else None).raise_for_errors()
    write_text_atomically(file, made.text)
    if (warning := source.describe_skipped()) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    _print_next(made, file, accelerator)


def _print_next(made: "NewConfig", file: Path, accelerator: str | None) -> None:
    """What was written, and the commands that lead from there to the first update."""
    data, given = made.config.data, shlex.quote(str(file))
    print(f"wrote {file}: robot {kind_name(data.robot)}, {made.config.qchunking.action_dim} action dims")
    for slot, camera in data.repack.cameras.items():
        print(f"  {slot}: {camera}")
    print(f"  state: {', '.join(data.repack.state)}\n  actions: {', '.join(data.repack.actions)}")
    print(f"{made.note}\n\nNext:")
    if made.label_command is not None:
        print(f"  {made.label_command}    # or {made.label_example}: say how every episode ended")
    print(f"  acrlpd data stats --config {given}")
    if made.config.weight_loader.kind != "none":
        where = "" if accelerator is None else f" --accelerator {shlex.quote(accelerator)}"
        print(f"  acrlpd plan --config {given}{where}    # if you like: memory, hours and disk")
    start = ""
    if made.config.weight_loader.path is not None:
        start = f" --weight_loader.path {_print_downloads(made.config.weight_loader.path)}"
    print(f"  acrlpd train --config {given} --exp_name first{start}")


def _print_downloads(params: str) -> Path:
    """The commands that fetch released weights and their tokenizer, where missing; returns the copy of the weights."""
    from acrlpd.data.pipeline.tokenizer import default_tokenizer_path, download_command

    tokenizer, weights = default_tokenizer_path(), params.removesuffix("/params")
    if not tokenizer.is_file():
        print(f"  {download_command(tokenizer)}    # once: the tokenizer of the released weights")
    copy = _WEIGHTS / PurePosixPath(weights).name
    if not copy.exists():
        print(f"  mkdir -p {_WEIGHTS} && gsutil -m cp -r {weights} {_WEIGHTS}    # once: the released weights")
    return copy


def _find_devices(name: str | None) -> "Devices | None":
    """The accelerators of this name, or of this machine; None for a CPU."""
    import jax

    from acrlpd.config.plan import accelerators
    from acrlpd.data.tools.new_config import Devices

    if name is not None and name.lower() == "cpu":
        return None
    if name is not None:
        named = accelerators.accelerator(name)
        return Devices(named.name, named.memory_gib)
    accelerators.claim_device_memory()
    device, found = jax.local_devices()[0], accelerators.find_accelerator()
    if device.platform == "cpu":
        return None
    name = found.name if found else device.device_kind
    return Devices(name, accelerators.find_device_memory(), jax.local_device_count())


COMMANDS = {"list": list_, "show": show, "diff": diff, "new": new}
