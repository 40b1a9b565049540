"""Changing fields by dotted name, and what is said about those that do not exist or do not fit."""

import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acrlpd.config import ConfigError, apply_config_overrides, cli, config_hash, config_to_yaml, get_config, to_dict
from acrlpd.config.overrides import ALIASES, resolve_alias
from acrlpd.config.tree import NOT_HASHED, TYPE_KEY, all_fields, field_types, flatten, section_class, type_options
from acrlpd.config.yaml_files import parse_config
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.robots.aloha import Aloha

ALOHA = get_config("aloha")


def test_dotted_short_and_nested_names_are_the_same():
    by_path = apply_config_overrides(ALOHA, {"acrlpd.loss_weights.bc_weight": 0.5})
    assert by_path.acrlpd.loss_weights.bc_weight == 0.5
    assert apply_config_overrides(ALOHA, {"loss_weights.bc_weight": 0.5}) == by_path
    assert apply_config_overrides(ALOHA, {"acrlpd": {"loss_weights": {"bc_weight": 0.5}}}) == by_path
    assert apply_config_overrides(ALOHA, bc_weight=0.5) == by_path
    assert apply_config_overrides(ALOHA) == ALOHA


def test_every_alias_leads_to_a_field():
    names = all_fields()
    for target in ALIASES.values():
        assert any(name == target or name.startswith(f"{target}.") for name in names), target


def test_adapt_to_pi_is_an_option_of_aloha_alone():
    assert ALOHA.data.robot == Aloha(adapt_to_pi=True)
    assert apply_config_overrides(ALOHA, {"data.adapt_to_pi": False}).data.robot == Aloha(adapt_to_pi=False)
    with pytest.raises(ConfigError, match=r"unknown key 'data.adapt_to_pi'; data.robot \(Generic\) has no keys"):
        apply_config_overrides(get_config("debug"), {"data.adapt_to_pi": True})


def test_original_is_not_changed():
    before = to_dict(ALOHA)
    apply_config_overrides(ALOHA, {"critic.hidden_dims": [1, 2]})
    assert to_dict(ALOHA) == before


def test_integers_become_floats_but_not_the_other_way():
    assert apply_config_overrides(ALOHA, {"acrlpd.discount": 1}).acrlpd.discount == 1.0
    with pytest.raises(ConfigError, match=r"batch_size must be an integer; found 3\.5"):
        apply_config_overrides(ALOHA, {"batch_size": 3.5})
    with pytest.raises(ConfigError, match="batch_size must be an integer; found True"):
        apply_config_overrides(ALOHA, {"batch_size": True})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("critic.num_critic", 4, "unknown key 'critic.num_critic'; did you mean 'critic.num_critics'?"),
        ("num_critics", 4, "unknown key 'num_critics'; did you mean 'critic.num_critics'?"),
        ("traning.offline_steps", 4, "did you mean 'training.offline_steps'?"),
        ("batchsize", 4, "did you mean 'batch_size'?"),
        ("zzz", 4, "`acrlpd configs show NAME` lists all keys"),
        ("critic.q_aggregation", "men", "one of min, mean, weighted; found 'men'; did you mean 'mean'?"),
        ("critic.hidden_dims", 5, "critic.hidden_dims must be a list of int; found 5"),
        ("critic.hidden_dims", ["a"], "critic.hidden_dims must be a list of int"),
        ("model.image_resolution", [1], "must be a list of 2 int"),
        ("acrlpd.discount", float("nan"), "a finite number"),
        ("acrlpd.discount", "0.9", "a finite number; found '0.9'"),
        ("loss_weights.bc_weight", None, "loss_weights.bc_weight must be a finite number; found None"),
        ("critic", 3, "critic must be the name of a kind; found 3"),
        ("qchunking", 3, "qchunking is a section; set its fields (horizon_length"),
        ("seed.x", 3, "seed is a plain value and has no fields"),
        (
            "model.type",
            "state_flo",
            "one of gaussian, pi0, pi0_fast, state_flow, or module:Name of your own; found 'state_flo'; did you mean",
        ),
        ("model.paligemma_variant", "gemma_3b", "model: paligemma_variant must be one of"),
        ("model.state_dim", 3, "unknown key 'model.state_dim'; model (Pi0Config) has dtype, "),
        ("model.zzz", 3, "unknown key 'model.zzz'; model (Pi0Config) has dtype, "),
        ("data.rewards.value", 3, "data.rewards (RewardConfig) has source, "),
        ("training.num_critics", 3, "unknown key 'training.num_critics'; did you mean 'critic.num_critics'?"),
    ],
)
def test_mistakes_are_named(key, value, message):
    with pytest.raises(ConfigError) as error:
        apply_config_overrides(ALOHA, {key: value})
    assert message in str(error.value)


def test_all_mistakes_in_one_message():
    with pytest.raises(ConfigError) as error:
        apply_config_overrides(ALOHA, {"a": 1, "batch_size": "x", "seed": 3})
    assert len(str(error.value).splitlines()) == 2


def test_switching_to_another_class_takes_its_defaults():
    config = apply_config_overrides(
        ALOHA,
        {"model.state_dim": 9, "model.type": "state_flow", "actor_lr_schedule.type": "rsqrt"},
    )
    assert config.model == StateFlowPolicyConfig(state_dim=9)
    assert config.actor_lr_schedule.timescale == 10_000
    assert parse_config(config_to_yaml(config)) == config


def test_token_length_and_state_input_follow_pi05_unless_given():
    model = apply_config_overrides(ALOHA, {"model.pi05": True}).model
    assert isinstance(model, Pi0Config)
    assert (model.max_token_len, model.discrete_state_input) == (200, True)
    model = apply_config_overrides(ALOHA, {"model.pi05": True, "model.max_token_len": 64}).model
    assert isinstance(model, Pi0Config)
    assert model.max_token_len == 64


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model.pi05"], (200, True)),
        (["--model.pi05", "--model.max_token_len", "48"], (48, True)),
        (["--model.pi05", "--model.max-token-len=48"], (48, True)),
        (["--model.discrete-state-input", "False", "--model.pi05"], (200, False)),
    ],
)
def test_a_flag_counts_also_with_the_value_of_the_preset(flags, expected):
    model = cli(["--config", "aloha", *flags]).model
    assert (model.pi05, model.max_token_len, model.discrete_state_input) == (True, *expected)
    assert cli(["--config", "aloha_pi05", "--model.no-pi05"]).model.max_token_len == 48


@pytest.mark.parametrize("preset", ["aloha_sim", "quickstart"])
@pytest.mark.parametrize("flag", ["--lerobot_repo_id", "--data.repo-id"])
def test_a_repo_id_is_the_dataset(preset, flag):
    """The directory of the preset and its scripted demonstrations are dropped, unless a directory is given."""
    own = get_config(preset).data
    data = cli(["--config", preset, flag, "me/data"]).data
    assert (data.repo_id, data.data_dir, data.demonstrations.num_episodes) == ("me/data", None, 0)
    for directory in ("/mine", own.data_dir):
        for other in ("--data_dir", "--data.data-dir"):
            data = cli(["--config", preset, other, directory, flag, "me/data"]).data
            assert (data.repo_id, data.data_dir, data.demonstrations) == ("me/data", directory, own.demonstrations)
    in_file = parse_config(f"base_config: {preset}\ndata:\n  repo_id: me/data\n")
    assert (in_file.data.repo_id, in_file.data.data_dir) == ("me/data", None)
    assert parse_config(config_to_yaml(get_config(preset))).data == own


def _strategy(annotation: object) -> st.SearchStrategy:
    options = []
    for option in type_options(annotation):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal:
            options.append(st.sampled_from(args))
        elif origin is tuple and args[-1] is Ellipsis:
            options.append(st.lists(_strategy(args[0]), max_size=3))
        elif origin is tuple:
            options.append(st.tuples(*map(_strategy, args)).map(list))
        else:
            options.append(
                {
                    types.NoneType: st.none(),
                    bool: st.booleans(),
                    int: st.integers(-(10**9), 10**9),
                    float: st.floats(allow_nan=False, allow_infinity=False),
                    str: st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12),
                }[option]
            )
    return st.one_of(options)


def _leaf_type(name: str) -> object:
    cls, data = type(ALOHA), to_dict(ALOHA)
    *sections, leaf = name.split(".")
    for section in sections:
        data = data[section]
        cls = section_class(field_types(cls)[section], data, section)
    return field_types(cls)[leaf]


# The model refuses sizes that cannot be built, so its fields are not set at random.
_LEAVES = [name for name, _ in flatten(to_dict(ALOHA)) if not name.startswith("model.") and TYPE_KEY not in name]


@settings(max_examples=60)
@given(data=st.data())
def test_any_change_survives_yaml_and_changes_the_hash(data):
    names = data.draw(st.lists(st.sampled_from(_LEAVES), min_size=1, max_size=4, unique=True))
    changes = {name: data.draw(_strategy(_leaf_type(name)), label=name) for name in names}
    config = apply_config_overrides(ALOHA, changes)
    assert parse_config(config_to_yaml(config)) == config
    hashed = [n for n in names if n.split(".")[0] not in NOT_HASHED]
    old, new = dict(flatten(to_dict(ALOHA))), dict(flatten(to_dict(config)))
    differs = any(old[name] != new[name] for name in hashed)
    assert (config_hash(config) != config_hash(ALOHA)) == differs


def test_resolve_alias_takes_the_longest_prefix():
    assert resolve_alias("model.pi0_config.action_horizon") == "model.action_horizon"
    assert resolve_alias("model.pi0_config.diffusion_steps") == "acrlpd.sampling_steps"
    assert resolve_alias("critic.num_critics") == "critic.num_critics"


def test_an_unknown_key_of_a_schedule_is_told_the_keys_of_that_schedule() -> None:
    for key in ("value", "warmup_steps"):  # no schedule has the first key, only other schedules have the second
        with pytest.raises(ConfigError, match=r"critic_lr_schedule \(ConstantSchedule\) has peak_lr$"):
            apply_config_overrides(ALOHA, {"critic_lr_schedule.type": "constant", f"critic_lr_schedule.{key}": 3})
