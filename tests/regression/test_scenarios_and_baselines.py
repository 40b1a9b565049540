"""The files of scenarios and baselines, right and wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from measurements import ORIGIN, measurement

from acrlpd.cli.main import main
from acrlpd.config import get_config, validate_config
from acrlpd.regression.baseline import (
    BaselineError,
    check_comparable,
    find_differences,
    read_baseline,
    write_baseline,
)
from acrlpd.regression.scenario import Scenario, find_scenario, shipped_names

EXAMPLE = Scenario("example", "", get_config("debug"), (0, 1, 2, 3))
OWN = "config: debug\nseeds: [0, 1, 2]\noverrides: {critic_lr: 2e-3}\n"


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_scenarios_can_be_trained(name: str) -> None:
    scenario = find_scenario(name)
    assert validate_config(scenario.config).errors == ()
    assert scenario.description


def test_an_own_scenario_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    scenario = find_scenario(str(tmp_path / "own.yaml"))
    assert (scenario.name, scenario.seeds) == ("own", (0, 1, 2))
    assert scenario.config.critic_lr_schedule.peak_lr == 2e-3


def test_the_config_of_a_scenario_may_be_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base_config: debug\nbatch_size: 12\n")
    (tmp_path / "own.yaml").write_text("config: mine.yaml\nseeds: [0, 1, 2]\n")
    assert find_scenario(str(tmp_path / "own.yaml")).config.batch_size == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config: debug\n", "expected the keys config"),
        ("- debug\n", "expected the keys config"),
        ("config: debug\nseeds: [0, 1]\n", "seeds must have at least 3 elements"),
        ("config: debug\nseeds: [0, 1, 1]\n", "seeds must be different whole numbers"),
        ("config: debug\nseeds: [0, 1, -1]\n", "seeds must lie in"),
        ("config: debug\nseeds: 3\n", "seeds must be a list"),
        ("config: debgu\nseeds: [0, 1, 2]\n", "unknown config 'debgu'"),
        ("config: debug\nseeds: [0, 1, 2]\nsteps: 3\n", "unknown key 'steps'"),
        ("config: debug\nseeds: [0, 1, 2]\noverrides: {critic_rl: 1}\n", "unknown key 'critic_rl'"),
        ("config: [debug\n", "cannot be read"),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert main(["regress", "check", str(path), "--baselines", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error


def test_unknown_names_and_missing_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regress", "check", "coridor"]) == 2
    assert "did you mean 'corridor'" in capsys.readouterr().err
    assert main(["regress", "record", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
    assert main(["regress", "check", "corridor", "--baselines", str(tmp_path)]) == 2
    assert "there is no baseline" in capsys.readouterr().err


def test_a_baseline_survives_its_file(tmp_path: Path) -> None:
    write_baseline(tmp_path / "new" / "example.json", measurement())
    assert read_baseline(tmp_path / "new" / "example.json") == measurement()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"format": 99}, "has the format 99"),
        (lambda content: content | {"origin": {}}, "is damaged"),
        (lambda content: {name: content[name] for name in content if name != "early"}, "is damaged"),
        (lambda content: content | {"final": None}, "is damaged"),
        (lambda content: [content], "is damaged"),
    ],
)
def test_a_baseline_that_cannot_be_used_says_what_to_do(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "example.json"
    write_baseline(path, measurement())
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(BaselineError, match=message) as error:
        read_baseline(path)
    assert "regress record" in str(error.value) and "--overwrite" in str(error.value)


def test_record_does_not_replace_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses before the first scenario is trained."""
    path = tmp_path / "pi0_images.json"
    path.write_text("kept")
    assert main(["regress", "record", "corridor", "pi0_images", "--baselines", str(tmp_path)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert path.read_text() == "kept" and not (tmp_path / "corridor.json").exists()


def test_baselines_of_other_scenarios_and_seeds_are_refused() -> None:
    check_comparable(EXAMPLE, measurement())
    with pytest.raises(BaselineError, match="'another'"):
        check_comparable(EXAMPLE, measurement(scenario="another"))
    with pytest.raises(BaselineError, match=r"\[0, 1, 2, 3\].*\[4, 5, 6\]"):
        check_comparable(EXAMPLE, measurement(seeds=(4, 5, 6)))


def test_a_config_field_that_is_gone_breaks_the_configs_of_users() -> None:
    old = measurement().config | {"gone": 1}
    with pytest.raises(BaselineError, match="unknown key 'gone'"):
        check_comparable(EXAMPLE, measurement(config=old))


def test_a_config_field_that_is_newer_than_the_baseline_has_its_default() -> None:
    old = {name: value for name, value in measurement().config.items() if name != "freeze_pi0_backbone"}
    check_comparable(EXAMPLE, measurement(config=old))
    assert list(find_differences(measurement(config=old), measurement())) == []


def test_other_conditions_are_named() -> None:
    config = measurement().config | {"batch_size": 16}
    origin = dataclasses.replace(ORIGIN, acrlpd="0.2.0", jax="0.11.0", cores=64)
    notes = "\n".join(find_differences(measurement(), measurement(config=config, origin=origin)))
    for text in ("acrlpd 0.1.0, now it is 0.2.0", "jax 0.10.2", "64 cores", "batch_size 8 -> 16", "record --overwrite"):
        assert text in notes
