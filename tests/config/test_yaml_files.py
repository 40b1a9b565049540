"""Experiment files: sections that change a preset, and errors with file and line."""

import pytest

from acrlpd.config import ConfigError, apply_config_overrides, config_to_yaml, get_config, load_config
from acrlpd.config.yaml_files import Setting, parse_config, settings_to_yaml

EXPERIMENT = """\
platform: droid
base_config: droid

training:
  offline_steps: 1800000
  online_steps: 150000
  batch_size: 96
  eval_frequency: 5000

model:
  pi0_config:
    action_horizon: 12
    diffusion_steps: 40

critic:
  num_critics: 12
  hidden_dims: [512, 512, 256, 128]

loss_weights:
  bc_weight: 0.015
  critic_weight: 1.0
  alpha_weight: 0.8

optimization:
  pi0_lr_schedule:
    peak_lr: 2e-5
    decay_steps: 80000
  gradient_accumulation_steps: 2
"""


def test_experiment_file_changes_what_it_says_and_nothing_else():
    config = parse_config(EXPERIMENT)
    base = get_config("droid")
    assert (config.training.offline_steps, config.training.online_steps) == (1_800_000, 150_000)
    assert (config.batch_size, config.training.eval_frequency) == (96, 5_000)
    assert (config.model.action_horizon, config.acrlpd.sampling_steps) == (12, 40)
    assert config.critic.hidden_dims == (512, 512, 256, 128)
    assert (config.acrlpd.loss_weights.bc_weight, config.acrlpd.loss_weights.alpha_weight) == (0.015, 0.8)
    assert (config.actor_lr_schedule.peak_lr, config.actor_lr_schedule.decay_steps) == (2e-5, 80_000)
    assert config.training.gradient_accumulation_steps == 2
    assert config.critic.dropout_rate == base.critic.dropout_rate
    assert config.data == base.data


def test_file_may_name_an_environment():
    assert parse_config("base_config: droid\nenvironment: debug").batch_size == 8


@pytest.mark.parametrize("text", ["2e-5", "2.0e-05", "0.00002", "+2E-5", ".2e-4"])
def test_numbers_may_be_written_as_people_do(text):
    config = parse_config(f"base_config: droid\nactor_lr_schedule:\n  peak_lr: {text}")
    assert config.actor_lr_schedule.peak_lr == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base_config: droid\ncritic:\n  num_critcs: 3",
            "run.yaml:3: unknown key 'critic.num_critcs'; did you mean 'critic.num_critics'?",
        ),
        ("base_config: droid\n\nbatch_size: many", "run.yaml:3: batch_size must be an integer; found 'many'"),
        ("base_config: driod", "run.yaml:1: unknown config 'driod'; did you mean 'droid'?"),
        ("base_config: droid\nenvironment: tset", "run.yaml:2: unknown environment 'tset'"),
        ("critic:\n  num_critics: 3", "run.yaml: base_config is missing"),
        ("platform: droid\nbase_config: aloha", "name two presets"),
        ("name: mine\nenvironment: debug", "run.yaml:2: environment changes a preset"),
        ("base_config: droid\nseed: 1\nseed: 2", "run.yaml:3: seed is given twice"),
        (
            "base_config: droid\ncritic: {num_critics: 3}\ncritic.num_critics: 4",
            "run.yaml:3: critic.num_critics is given twice: critic.num_critics at run.yaml:2",
        ),
        (
            "base_config: droid\ncritic_lr: 1e-3\ncritic_lr_schedule:\n  peak_lr: 2e-3",
            "run.yaml:4: critic_lr_schedule.peak_lr is given twice: critic_lr at run.yaml:2",
        ),
        ("base_config: droid\nmodel: pi0\nmodel.type: gaussian", "run.yaml:3: model.type is given twice: model at run"),
        ("base_config: droid\nexp_name: !foo bar", "run.yaml:2: the value of exp_name cannot be read: could not"),
        ("base_config: droid\nseed: 2024-99-99", "run.yaml:2: the value of seed cannot be read: month must be"),
        ("base_config: droid\ncritic: [1", "run.yaml:2: not valid YAML: expected ',' or ']'"),
        ("data: &a\n  data_dir: x\n  rewards: *a", "run.yaml:3: data.rewards is an alias of a section around it"),
        ("- a\n- b", "run.yaml must hold"),
        ("", "run.yaml must hold"),
        ("base_config: droid\nloss_weights:\n  bc_weight: null", "run.yaml:3: loss_weights.bc_weight must be"),
    ],
)
def test_mistakes_come_with_file_and_line(text, message):
    with pytest.raises(ConfigError) as error:
        parse_config(text, "run.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["3e-4", "12e4567", "1e5", "pick up\nthe cube"])
def test_text_stays_text(text: str) -> None:
    """Runs are named after learning rates and hashes, and prompts may have several lines."""
    config = apply_config_overrides(get_config("droid"), {"exp_name": text, "data.default_prompt": text})
    assert parse_config(config_to_yaml(config)) == config
    settings = {"base_config": "droid", "exp_name": text, "data.default_prompt": text}
    experiment = settings_to_yaml({name: Setting(value) for name, value in settings.items()}, ["header"])
    assert parse_config(experiment) == config


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read: .*No such file"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
