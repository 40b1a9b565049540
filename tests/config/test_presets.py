"""Every preset loads, holds together, survives YAML, and has the numbers it promises."""

import dataclasses
import os
import subprocess
import sys

import pytest

from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.config import (
    ConfigError,
    apply_config_overrides,
    config_hash,
    config_to_yaml,
    diff_configs,
    get_config,
    list_configs,
    load_config,
    load_training_config,
    save_config,
    validate_config,
)
from acrlpd.config.registry import describe_config
from acrlpd.config.yaml_files import parse_config
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha

REQUIRED = {
    *("droid", "aloha", "libero", "aloha_fold", "aloha_sim", "aloha_pi05", "libero_pi05", "droid_pi05"),
    *("droid_seeds", "aloha_seeds", "libero_seeds", "aloha_fold_seeds"),
    *("quickstart", "quickstart_mixed", "smoke", "debug", "rl_fold_box", "rl_libero", "rl_droid"),
    *("quickstart_expo", "quickstart_dsrl", "aloha_sim_expo", "aloha_sim_dsrl", "quickstart_recap", "aloha_recap"),
    *("aloha_sim_dsrl_sac", "pi0_fast_droid", "pi0_fast_libero", "debug_fast"),
    *("qc_cube_double", "qc_fql_scene", "bfn_cube_triple", "bfn_n_puzzle_3x3", "fql_cube_quadruple", "fql_n_scene"),
    *("rlpd_cube_double", "rlpd_ac_puzzle_3x3", "dqc_cube_double"),
}

ROBOTS = ("aloha", "aloha_pi05", "droid", "droid_pi05", "libero", "libero_pi05", "aloha_fold")


def test_all_presets_and_aliases_exist():
    assert set(list_configs()) >= REQUIRED
    assert all(list_configs().values())


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_preset_validates_and_survives_yaml(name, tmp_path):
    config = get_config(name)
    assert validate_config(config).errors == ()
    assert len(describe_config(name)) > 80
    assert parse_config(config_to_yaml(config)) == config
    save_config(config, tmp_path / "config.yaml")
    loaded = load_config(tmp_path / "config.yaml")
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)
    hash(config)  # usable as a static argument


@pytest.mark.parametrize("name", [name for name in ROBOTS if get_config(name).env.id is None])
def test_without_an_environment_the_first_verdict_comes_early(name):
    """Held-out episodes cost little, and nothing else tells whether a run of hours goes well.

    A verdict that is the best so far saves: between two checkpoints it would write tens of GB once more.
    """
    training = get_config(name).training
    assert 0 < training.eval_frequency <= training.offline_steps / 20
    assert training.eval_frequency % training.save_frequency == 0


def test_aliases_are_the_same_config():
    assert get_config("rl_fold_box") == get_config("aloha_fold")
    assert get_config("rl_droid") == get_config("droid")
    assert get_config("rl_libero") == get_config("libero")


@pytest.mark.parametrize(
    ("name", "action_dim", "horizon", "critics", "hidden", "samples", "batch", "bc", "discount"),
    [
        ("droid_seeds", 8, 10, 10, (512, 512, 256), 16, 64, 0.01, 0.995),
        ("aloha_seeds", 14, 20, 8, (256, 256, 128), 32, 128, 0.001, 0.99),
        ("libero_seeds", 7, 5, 12, (512, 512, 256, 128), 64, 256, 0.1, 0.98),
        ("aloha_fold_seeds", 14, 20, 10, (512, 512, 512), 4, 32, 0.05, 0.99),
    ],
)
def test_the_numbers_of_the_seeds(name, action_dim, horizon, critics, hidden, samples, batch, bc, discount):
    config = get_config(name)
    assert isinstance(config.model, Pi0Config)
    assert (config.model.action_dim, config.model.max_token_len) == (32, 48)
    assert (config.qchunking.action_dim, config.qchunking.horizon_length) == (action_dim, horizon)
    assert (config.critic.num_critics, config.critic.hidden_dims) == (critics, hidden)
    assert (config.acrlpd.num_action_samples, config.batch_size) == (samples, batch)
    assert (config.acrlpd.loss_weights.bc_weight, config.acrlpd.discount) == (bc, discount)


def test_the_augmentation_of_the_seeds():
    levels = {name: get_config(f"{name}_seeds").data.augmentation_level for name in ("aloha", "droid", "libero")}
    assert levels == {"aloha": "light", "droid": "standard", "libero": "strong"}


@pytest.mark.parametrize(
    ("name", "offline", "online", "actor_decay", "critic_decay"),
    [
        ("droid_seeds", 2_000_000, 200_000, 100_000, 80_000),
        ("aloha_seeds", 500_000, 100_000, 30_000, 25_000),
        ("libero_seeds", 1_000_000, 500_000, 50_000, 40_000),
        ("aloha_fold_seeds", 20_000, 0, 50_000, 50_000),
    ],
)
def test_the_lengths_of_the_seeds(name, offline, online, actor_decay, critic_decay):
    config = get_config(name)
    assert (config.training.offline_steps, config.training.online_steps) == (offline, online)
    assert isinstance(config.actor_lr_schedule, CosineDecaySchedule)
    assert isinstance(config.critic_lr_schedule, CosineDecaySchedule)
    assert (config.actor_lr_schedule.decay_steps, config.critic_lr_schedule.decay_steps) == (actor_decay, critic_decay)


@pytest.mark.parametrize("name", ROBOTS)
def test_learning_rates_fall_until_a_run_ends_and_checkpoints_stay_where_they_are_saved(name):
    config = get_config(name)
    for schedule in (config.actor_lr_schedule, config.critic_lr_schedule):
        assert isinstance(schedule, CosineDecaySchedule)
        assert schedule.decay_steps == config.num_train_steps
    assert (config.checkpoints.keep_period or 0) % config.training.save_frequency == 0
    assert validate_config(config, num_devices=config.fsdp.fsdp_devices).errors == ()


def test_fold_box_is_what_the_robot_needs():
    config = get_config("rl_fold_box")
    assert config.model.action_horizon == 20
    assert len(config.data.repack.cameras) == 3
    assert config.data.default_prompt == "fold the box"
    assert config.data.robot == Aloha(adapt_to_pi=False)
    assert config.data.rewards.reward_column == "reward"
    assert get_config("aloha_fold_seeds").training.gradient_accumulation_steps > 1
    assert (config.num_train_steps, config.fsdp.fsdp_devices) == (20_000, 8)


@pytest.mark.parametrize("name", ["aloha", "libero", "droid"])
def test_pi05_twins_differ_only_where_the_network_does(name):
    twin = get_config(f"{name}_pi05")
    assert isinstance(twin.model, Pi0Config)
    assert twin.model.pi05
    assert twin.model.max_token_len == 200
    allowed = ("name", "model.", "weight_loader.", "openpi_compatibility.", "actor_lr_schedule.", "data.use_delta")
    assert all(key.startswith(allowed) for key in diff_configs(get_config(name), twin))


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown config 'libreo'; did you mean 'libero'\?"):
        get_config("libreo")


def test_stages_scale_the_run():
    production = load_training_config("droid")
    assert production == get_config("droid")
    development = load_training_config("droid", "development")
    assert development.training.offline_steps == production.training.offline_steps // 4
    assert development.training.online_steps == production.training.online_steps // 2
    assert (development.training.eval_frequency, development.training.save_frequency) == (1_000, 2_000)
    debug = load_training_config("libero", "debug", {"loss_weights.bc_weight": 0.5})
    assert (debug.training.offline_steps, debug.training.online_steps) == (1_000, 500)
    assert (debug.batch_size, debug.acrlpd.num_action_samples, debug.training.log_frequency) == (8, 4, 10)
    assert debug.acrlpd.loss_weights.bc_weight == 0.5
    with pytest.raises(ConfigError, match="did you mean 'production'"):
        load_training_config("droid", "prodction")


@pytest.mark.parametrize("name", sorted(REQUIRED))
@pytest.mark.parametrize("environment", ["development", "debug"])
def test_every_preset_is_valid_and_not_longer_in_every_stage(name, environment):
    production, other = get_config(name), load_training_config(name, environment)
    assert not validate_config(other).errors
    assert other.training.offline_steps <= production.training.offline_steps
    assert other.training.online_steps <= production.training.online_steps
    assert other.batch_size <= production.batch_size


def test_hash_is_the_same_in_another_process_and_ignores_where_results_go():
    config = get_config("libero")
    code = "from acrlpd.config import *; print(config_hash(get_config('libero')))"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert result.stdout.strip() == config_hash(config)
    moved = apply_config_overrides(
        config, {"exp_name": "other", "checkpoint_dir": "/elsewhere", "logging.wandb": "offline"}
    )
    assert config_hash(moved) == config_hash(config)
    assert config_hash(dataclasses.replace(config, seed=43)) != config_hash(config)
