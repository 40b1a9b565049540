"""docs/from_the_seeds.md is true: its commands and snippets run, and every name on its right side exists."""

import importlib
import pathlib
import re
import shlex

import jax
import pytest
import yaml

from acrlpd.choice import kind_names
from acrlpd.cli import eval as cli_eval
from acrlpd.cli import export as cli_export
from acrlpd.cli import main as cli_main
from acrlpd.cli import serve as cli_serve
from acrlpd.cli.train import TrainOptions, adapt
from acrlpd.config import RLTrainConfig, get_config, load_config, save_config, validate_config
from acrlpd.config.command_help import sections
from acrlpd.config.command_line import ConfigFlags, parse_config_args
from acrlpd.config.flag_names import known_flags
from acrlpd.config.registry import list_configs
from acrlpd.config.tree import all_fields, families

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "from_the_seeds.md").read_text()

# Errors of a config that say what this machine lacks, not what is wrong with the command.
_OF_THIS_MACHINE = ("does not exist", "no dataset", "norm statistics", "devices")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert all(line.startswith("acrlpd ") for line in lines)
    return [shlex.split(line)[2:] for line in lines if line.split()[1] == name]


def words() -> set[str]:
    """Everything in backticks on the right side of a table."""
    rows = [line.strip().strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|")]
    assert len(rows) > 250 and all(len(row) == 2 for row in rows)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row[1])}


def imports(name: str) -> bool:
    """Whether a dotted name is a module, or something in a module or in a class."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def flags() -> set[str]:
    options = (TrainOptions, ConfigFlags, cli_export.ExportOptions, cli_eval.EvalOptions, cli_serve.ServeOptions)
    return {f"--{name}" for name in known_flags(get_config("debug"), options)} | {"--debug"}


def exists(word: str) -> bool:
    """Whether a word on the right side of a table means something; words of another form are not looked up."""
    if word.startswith("--"):
        return word.split()[0].split("=")[0] in flags()
    if word.startswith("acrlpd "):
        command, *subcommand = word.split()[1:]
        module = command in cli_main.COMMANDS and importlib.import_module(f"acrlpd.cli.{command}")
        known = getattr(module, "COMMANDS", {})
        return bool(module) and (not subcommand or not known or subcommand[0] in known)
    if word.startswith("seeds."):
        return imports(f"acrlpd.{word}")
    if re.fullmatch(r"[a-z_0-9]+(\.\w+)+", word) and not word.endswith(".json"):
        is_field = word in all_fields() or any(name.startswith(f"{word}.") for name in all_fields())
        return is_field or (imports(word) if word.startswith("acrlpd.") else word.split(".")[0] not in sections())
    return True


@pytest.mark.parametrize("args", commands("train"), ids=" ".join)
def test_a_command_gives_a_config_that_can_run(args: list[str]) -> None:
    if "--resume" in args and not args[(args.index("--resume") + 1) % len(args)].startswith("--"):
        del args[args.index("--resume") + 1]  # The checkpoint does not exist here; test_any_checkpoint.py resumes one.
    config, options = parse_config_args(TrainOptions, [arg for arg in args if arg != "--debug"])
    config = adapt(config, options)
    errors = validate_config(config, num_devices=config.fsdp.fsdp_devices).errors
    assert [error for error in errors if not any(text in error for text in _OF_THIS_MACHINE)] == []
    assert config.training.online_steps == 0 or config.env.id is not None


def test_the_other_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(name, args) for name in ("plan", "configs") for args in commands(name)]
    assert len(found) == 3
    for name, args in found:
        assert cli_main.main([name, *args]) == 0
    assert "gradients" in capsys.readouterr().out


def test_a_command_of_the_seeds_trains(config: RLTrainConfig, tmp_path: pathlib.Path) -> None:
    """004's end-to-end test, with a policy that trains in a second."""
    path = tmp_path / "tiny.yaml"
    save_config(config, path)
    [args] = [args for args in commands("train") if "ci_test" in args]
    args[args.index("--config") + 1] = str(path)
    args[args.index("--offline_steps") + 1] = "4"
    args += ["--checkpoint_dir", str(tmp_path)]
    assert cli_main.main(["train", *args]) == 0
    run = tmp_path / "debug" / "ci_test"
    assert (run / "4" / "params").is_dir() and load_config(run / "config.yaml").training.online_steps == 0
    args += ["--resume", "--pi0_peak_lr", "2e-3", "--bc_weight", "0.5"]
    assert cli_main.main(["train", *args]) == 2
    assert cli_main.main(["train", *args, "--override_lr_schedule"]) == 0
    assert load_config(run / "config.yaml").acrlpd.loss_weights.bc_weight == 0.5


def test_the_snippets_run(config: RLTrainConfig) -> None:
    names = {"rl_config": config}
    for snippet in blocks("python"):
        exec(compile(snippet, "from_the_seeds.md", "exec"), names)
    assert int(names["trained_agent"].step) == config.training.offline_steps
    names["dataloader"].close()
    assert isinstance(names["state_sharding"].step, jax.sharding.Sharding)


def test_the_experiment_file_is_read(tmp_path: pathlib.Path) -> None:
    [text] = blocks("yaml")
    assert yaml.safe_load(text)["platform"] == "droid"
    path = tmp_path / "acrlpd_droid_experiment.yaml"
    path.write_text(text)
    config = load_config(path)
    assert (config.batch_size, config.model.action_horizon, config.acrlpd.sampling_steps) == (96, 12, 40)
    assert (config.training.offline_steps, config.actor_lr_schedule.peak_lr) == (1_800_000, 2e-5)


def test_every_name_of_the_tables_exists() -> None:
    assert sorted(word for word in words() if not exists(word)) == []


def test_the_presets_of_the_page_exist() -> None:
    named = set(re.findall(r"`((?:droid|aloha|libero|aloha_fold)_seeds)`", PAGE))
    assert len(named) == 4 and named | {"smoke"} <= set(list_configs())
    assert "pi0_fast" in kind_names(families()["model"])
