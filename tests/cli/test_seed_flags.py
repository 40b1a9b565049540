"""The flags of the seed documents, flags that do not exist, and an online phase without an environment."""

import re

import pytest

from acrlpd.cli.main import main
from acrlpd.cli.plan import PlanOptions
from acrlpd.cli.train import TrainOptions, adapt
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.command_line import ConfigFlags, parse_config_args
from acrlpd.config.flag_names import SEED_FLAGS, refuse_unknown_flags


def parse(*args: str):
    return parse_config_args(TrainOptions, ["--config", "aloha_fold", *args])


# Flags of the seeds, and what they change in a config.
CHANGES = {
    "--experiment_name first": {"exp_name": "first"},
    "--num_steps=50000": {"training.offline_steps": 50_000},
    "--save_interval 500": {"training.save_frequency": 500},
    "--log_frequency 10": {"training.log_frequency": 10},
    "--eval-frequency=100": {"training.eval_frequency": 100},
    "--early_stopping_patience 50": {"training.early_stopping_patience": 50},
    "--data_path /data/box": {"data.data_dir": "/data/box"},
    "--debug_mode": {"logging.debug": True},
    "--pi0_peak_lr 1e-5": {"actor_lr_schedule.peak_lr": 1e-5, "actor_lr_schedule.decay_lr": 3e-6 * 1e-5 / 3e-5},
    "--critic_peak_lr 3e-3": {"critic_lr_schedule.peak_lr": 3e-3, "critic_lr_schedule.decay_lr": 3e-5 * 3e-3 / 3e-4},
    "--pi0_checkpoint_path=/weights": {"weight_loader.kind": "checkpoint", "weight_loader.path": "/weights"},
}


def test_the_flags_of_the_seeds_change_their_fields_and_nothing_else():
    config, _ = parse(*" ".join(CHANGES).split())
    changes = {field: value for fields in CHANGES.values() for field, value in fields.items()}
    assert config == apply_config_overrides(get_config("aloha_fold"), changes)
    config, _ = parse("--save_frequency", "7")
    assert config == apply_config_overrides(get_config("aloha_fold"), save_frequency=7)
    assert {flag.partition("=")[0].split()[0][2:].replace("-", "_") for flag in CHANGES} == {*SEED_FLAGS} - {
        "save_frequency"
    }


def test_every_flag_of_the_seeds_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "run"])
    shown = capsys.readouterr().out
    assert all(f"--{name} " in shown for name in SEED_FLAGS)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--experiment_nam", "--experiment_name"),
        ("--num_critics", "--critic.num_critics"),
        ("--critic.num_critic", "--critic.num_critics"),
        ("--model.discount", "--acrlpd.discount"),
        ("--num_critic", "--critic.num_critics"),
        ("--dry_rum", "--dry_run"),
        ("--warmup_steps", "--actor_lr_schedule.warmup_steps or --critic_lr_schedule.warmup_steps"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_names(flag, meant, capsys):
    assert main(["train", "--config", "aloha_fold", flag, "1"]) == 2
    assert f"unknown flag {flag}; did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "options"), [("train", TrainOptions), ("plan", PlanOptions)])
def test_no_flag_of_the_help_is_refused(command, options, capsys):
    with pytest.raises(SystemExit):
        main([command, "--config", "debug", "--help", "all"])
    flags = re.findall(r"(?<![\w`])--[a-z][\w.-]+", capsys.readouterr().out)
    assert len(flags) > 200
    refuse_unknown_flags(flags, get_config("debug"), (options, ConfigFlags))


def test_override_lr_schedule_and_enable_fsdp_are_options_of_train():
    config, options = parse("--enable_fsdp", "--override_lr_schedule", "--fsdp_devices", "1")
    assert options.enable_fsdp and options.override_lr_schedule
    assert adapt(config, options).fsdp.fsdp_devices == 1  # as many as this machine has
    config, options = parse("--enable_fsdp")
    assert adapt(config, options).fsdp.fsdp_devices == 8  # the preset's own number


def test_an_online_phase_without_environment_is_skipped_with_a_warning(capsys):
    config, options = parse("--online_steps", "1000")
    assert adapt(config, options) == apply_config_overrides(config, online_steps=0)
    warning = capsys.readouterr().err
    assert "warning: the 1,000 online updates are skipped" in warning and "--env.id" in warning
    config, options = parse("--online_steps", "1000", "--env.id", "gym_aloha/AlohaInsertion-v0")
    assert adapt(config, options) == config
    config, options = parse("--online_steps", "1000", "--offline_steps", "0")
    assert adapt(config, options) == config  # nothing would be left to train, so the checks refuse it
    assert capsys.readouterr().err == ""
