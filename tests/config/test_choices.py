"""Sections that hold one of several classes: ours by short name, a user's own by module:Name."""

import re
import sys
from pathlib import Path

import pytest

from acrlpd.agents.schedules.base import LRSchedule
from acrlpd.choice import find_kind, kind_name, kind_names
from acrlpd.config import ConfigError, apply_config_overrides, cli, config_to_yaml, get_config, validate_config
from acrlpd.config.tree import families
from acrlpd.config.yaml_files import parse_config

OWN = """
import dataclasses
from acrlpd.agents.schedules.base import LRSchedule

@dataclasses.dataclass(frozen=True)
class Stairs(LRSchedule):
    peak_lr: float = 1e-3
    every: int = 100

    def create(self):
        return lambda count: self.peak_lr / (1 + count // self.every)

class NoDataclass(LRSchedule):
    peak_lr = 1e-3

    def create(self): ...

class Stranger: ...

@dataclasses.dataclass(frozen=True)
class Following(Stairs):
    floor: float = 1e-4

    def implied_changes(self, given):
        return {"floor": self.floor / self.peak_lr * given["peak_lr"]} if "peak_lr" in given else {}

@dataclasses.dataclass(frozen=True)
class NoDefault(LRSchedule):
    peak_lr: float

    def create(self): ...
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_schedules.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_schedules"
    sys.modules.pop("own_schedules", None)


def test_members_are_the_modules_of_the_package():
    assert kind_names(LRSchedule) == ("constant", "cosine", "rsqrt")
    assert all(kind_name(find_kind(LRSchedule, name)) == name for name in kind_names(LRSchedule))


def test_an_own_class_is_named_in_files_on_the_command_line_and_in_code(own_module):
    by_code = apply_config_overrides(get_config("debug"), {"critic_lr_schedule": f"{own_module}:Stairs"})
    assert by_code.critic_lr_schedule.create()(250) == pytest.approx(1e-3 / 3)
    by_file = parse_config(
        f"base_config: debug\ncritic_lr_schedule: {{type: {own_module}:Stairs, every: 10}}\n", "mine.yaml"
    )
    assert by_file.critic_lr_schedule.create()(25) == pytest.approx(1e-3 / 3)
    args = ["--config", "debug", "--critic_lr_schedule", f"{own_module}:Stairs", "--critic_lr_schedule.every", "10"]
    assert cli(args) == by_file
    assert parse_config(config_to_yaml(by_file)) == by_file


def test_naming_the_class_that_is_there_keeps_its_values():
    config = apply_config_overrides(get_config("debug"), {"actor_lr_schedule.peak_lr": 0.5})
    same = kind_name(config.actor_lr_schedule)
    assert apply_config_overrides(config, {"actor_lr_schedule": same}) == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cosin", "critic_lr_schedule must be one of constant, cosine, rsqrt, or module:Name .* did you mean 'cosine'"),
        ("nowhere_to_be_found:X", "cannot import 'nowhere_to_be_found'"),
        ("own_schedules:Missing", "has no 'Missing'"),
        ("own_schedules:Stranger", "must be a class that inherits from acrlpd.agents.schedules.base.LRSchedule"),
        ("own_schedules:NoDataclass", "must be a dataclass"),
        ("own_schedules:NoDefault", "needs a default for each of its fields; peak_lr has no default"),
        (".own:X", "not of the form module:Name"),
        (3, "must be the name of a kind; found 3"),
    ],
)
def test_mistakes(own_module, name, message):
    with pytest.raises(ConfigError, match=message):
        apply_config_overrides(get_config("debug"), {"critic_lr_schedule": name})


@pytest.mark.parametrize("flag", ["--critic_lr_schedule", "--critic-lr-schedule"])
def test_the_kind_of_a_section_is_a_flag(flag):
    expected = apply_config_overrides(get_config("debug"), {"critic_lr_schedule": {"type": "rsqrt", "timescale": 5.0}})
    for chosen in ([flag, "rsqrt"], [f"{flag}=rsqrt"], [flag, "cosine", flag, "rsqrt"]):
        assert cli(["--config", "debug", f"{flag}.timescale", "5", *chosen]) == expected


@pytest.mark.parametrize("end", [[], ["--seed", "3"]])
def test_a_flag_without_its_kind_names_the_kinds(end):
    message = "--critic-lr-schedule needs a value: constant, cosine, rsqrt, or module:Name"
    with pytest.raises(ConfigError, match=message):
        cli(["--config", "debug", "--critic-lr-schedule", *end])


@pytest.mark.parametrize("config", [[], ["--config", "debug"]])
def test_help_lists_the_kinds_of_every_section(config, capsys):
    with pytest.raises(SystemExit):
        cli([*config, "--help", "run"])
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    for section, family in families().items():
        assert f"--{section.replace('_', '-')}{'|'.join(kind_names(family))}|module:Name" in shown


def test_a_section_says_which_fields_change_with_others(own_module):
    """A field that is given keeps the given value."""
    kind = f"{own_module}:Following"
    base = apply_config_overrides(get_config("debug"), {"critic_lr_schedule": kind})
    change = {"critic_lr_schedule.peak_lr": 0.5}
    assert apply_config_overrides(base, change).critic_lr_schedule.floor == 0.05
    given = apply_config_overrides(base, change | {"critic_lr_schedule.floor": 0.01})
    assert given.critic_lr_schedule.floor == 0.01
    assert apply_config_overrides(base, {"critic_lr_schedule.floor": 0.2}).critic_lr_schedule.peak_lr == 1e-3
    both = apply_config_overrides(get_config("debug"), {"critic_lr_schedule": kind, **change})
    assert both.critic_lr_schedule.floor == 0.05


def test_the_schedule_of_the_documentation_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    [code] = re.findall(r"```python\n# my_schedules.py\n(.*?)```", page, re.DOTALL)
    [flags] = re.findall(r"PYTHONPATH=\. acrlpd train (.*my_schedules(?:.*\\\n)*.*)", page)
    (tmp_path / "my_schedules.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = cli(flags.replace("\\\n", " ").split())
    assert config.critic_lr_schedule.create()(1_200) == pytest.approx(0.25e-3)
    assert validate_config(config).errors == ()
    wrong = apply_config_overrides(config, {"critic_lr_schedule.every": 0})
    assert validate_config(wrong).errors == ("critic_lr_schedule.every must be above 0; found 0",)
    sys.modules.pop("my_schedules")
