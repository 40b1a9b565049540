"""Every `acrlpd` command on the pages is one that exists.

Commands are parsed as a user's would be and then left: commands, options and presets must exist. test_page_commands.py
runs them, unless a line of their block says what a test does not have; such a line is checked here.
"""

import dataclasses
import importlib
import itertools
import pkgutil
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from acrlpd import cli
from acrlpd.cli import train as cli_train
from acrlpd.cli.main import main
from acrlpd.config import RLTrainConfig, command_help, get_config, to_dict
from acrlpd.config.command_line import ConfigFlags, find_config
from acrlpd.config.flag_names import replace_seed_flags
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.tree import families, flatten
from page_commands import MARK, PAGES, TESTED_APART, VOCABULARY, blocks, commands, mentions, name


class Parsed(BaseException):
    """The command line was parsed; what would be run is not run."""


@pytest.fixture(scope="module", autouse=True)
def only_parsing() -> Iterator[None]:
    """Commands end when their arguments are parsed."""
    with pytest.MonkeyPatch.context() as patch:
        for info in pkgutil.iter_modules(cli.__path__):
            module = importlib.import_module(f"acrlpd.cli.{info.name}")
            if hasattr(module, "parse_arguments"):
                patch.setattr(module, "parse_arguments", ending_with_parsed(module.parse_arguments))
            if hasattr(module, "parse_config_args"):
                patch.setattr(module, "parse_config_args", ending_with_parsed(check_config_args))
        patch.setattr(cli_train, "_find_stored_config", lambda args: (args, None))  # The runs do not exist.
        yield


def ending_with_parsed(parse: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> None:
        raise Parsed(parse(*args, **options))

    return wrapper


def check_config_args(options: type, args: Sequence[str], **_: Any) -> None:
    """Whether all flags exist; the parser itself takes a seventh of a second for the hundreds of fields of a config."""
    args = replace_seed_flags(args)
    given = [arg.removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")]
    values = {flag: value for flag, value in itertools.pairwise(args) if flag.startswith("--")}
    name = values.get("--config", "debug")
    config = get_config("aloha") if name.endswith(".yaml") or name == "NAME" else find_config(name)
    kinds = {kind: values[f"--{kind}"] for kind in families() if f"--{kind}" in values}
    own = {kind for kind, value in kinds.items() if ":" in value}  # classes of the reader, whose fields nobody knows
    config = apply_config_overrides(config, {kind: value for kind, value in kinds.items() if kind not in own})
    fields = {path for path, _ in flatten(to_dict(config))} | {
        field.name for field in dataclasses.fields(RLTrainConfig)
    }
    parts = {field.name for part in (options, ConfigFlags) for field in dataclasses.fields(part)}
    known = fields | parts | {*families(), "help", "async"}
    for flag in given:
        plain = re.sub(r"\bno_(?=\w+$)", "", flag)
        if not {flag, plain} & known and plain.rpartition(".")[0] not in own:
            raise ValueError(f"unknown option --{flag}")
    topics = {"", "all", "run", *command_help.sections(), "SECTION"}
    if "--help" in values and not values["--help"].startswith("--") and values["--help"] not in topics:
        raise ValueError(f"unknown topic of help {values['--help']}")


def problems(lines: Sequence[str], capsys: pytest.CaptureFixture[str], *allowed: str) -> list[str]:
    """The commands that end with an error, and the error, unless it is one of the allowed ones."""
    found = []
    for line in dict.fromkeys(lines):
        try:
            code = main([word for word in shlex.split(line) if word != "..."])
        except Parsed:
            continue
        except SystemExit as end:  # help, or an error of the parser
            code = end.code
        shown = "".join(capsys.readouterr())
        if code and not any(text in shown for text in allowed):
            found.append(f"acrlpd {line}\n{shown}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_can_be_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (found := problems(commands(page), capsys)) == [], "\n".join(found)
    shortened = ("Required options", "Missing argument", "has: ", "usage: ")
    assert (found := problems(mentions(page), capsys, *shortened)) == [], "\n".join(found)


def test_a_command_that_does_not_exist_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "train --config debug --critic.num_critic 4",
        "train --config debgu",
        "eval run --candidates 4",
        "configs lits",
        "plan --config debug --improvement awr --improvement.noise 1",
    ]
    assert len(problems(wrong, capsys)) == len(wrong)
    right = ["train --config debug --critic.num-critics 4 --no_wandb --model.no-pi05", "data label d --help"]
    assert problems(right, capsys) == []


def test_marks_say_in_known_words_what_a_command_needs() -> None:
    bodies = [body for page in PAGES for body in blocks(page, "bash", "")]
    marks = [line for body in bodies for line in body.splitlines() if MARK.fullmatch(line)]
    assert marks and [line for line in marks if not VOCABULARY.fullmatch(line)] == []
    assert {name(page) for page in PAGES} >= TESTED_APART
