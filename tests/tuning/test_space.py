"""Space files: what they may hold, what is refused, and how values reach a config."""

import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acrlpd.config import ConfigError, apply_config_overrides, get_config, validate_config
from acrlpd.tuning.distributions import Choices, Range, from_param, to_param
from acrlpd.tuning.space import default_space, parse_space, read_value, with_values

CONFIG = get_config("quickstart")


def parse(text: str, config=CONFIG):
    return parse_space(text, "space.yaml", config)


def test_a_space_has_stages_in_their_order_with_typed_distributions():
    space = parse(
        "stages:\n"
        "  rates:\n"
        "    pi0_lr: {low: 1e-4, high: 2e-2, log: true}\n"
        "    critic: {num_critics: {low: 2, high: 8}}\n"  # nested, as in a config file
        "  rest:\n"
        "    improvement: [awr, best_of_n]\n"
        "    critic.hidden_dims: [[256, 256, 256], [512, 512]]\n"
        "    qchunking.success_ratio: [null, 0.5]\n"
    )
    assert [stage.name for stage in space.stages] == ["rates", "rest"]
    rates, rest = (stage.distributions for stage in space.stages)
    assert rates == {"pi0_lr": Range(1e-4, 2e-2, log=True), "critic.num_critics": Range(2, 8)}
    assert [type(one.low) for one in rates.values()] == [float, int]
    assert rest["critic.hidden_dims"] == Choices(([256, 256, 256], [512, 512]))
    assert rest["qchunking.success_ratio"].values == (None, 0.5)


def test_a_file_without_stages_is_one_stage_and_what_is_written_is_read_back():
    space = parse("batch_size: [32, 64]\nacrlpd.discount: {low: 0.9, high: 0.99}\n")
    assert [stage.name for stage in space.stages] == ["all"]
    assert parse(space.to_yaml()) == space


def test_all_mistakes_are_reported_together_with_line_and_nearest_name():
    with pytest.raises(ConfigError) as refused:
        parse(
            "stages:\n"
            "  rates:\n"
            "    critic.num_critix: [2, 4]\n"
            "    critic_lr: {low: 1e-2, high: 1e-4}\n"
            "    batch_size: {low: 32.5, high: 64}\n"
            "    critic.q_aggregation: {low: 1, high: 2}\n"
            "    acrlpd.discount: {low: 0.9, hihg: 0.99}\n"
            "    acrlpd.policy_data: [success, succes]\n"
            "    acrlpd.target_update_tau: {low: 0.001, high: 2.0}\n"
            "    model.action_horizon: [5]\n"
            "    evaluation.best_of_n: [8, 32]\n"
            "    training.offline_steps: [10, 20]\n"
            "    acrlpd.ema_decay: {low: 0.0, high: 0.999, log: true}\n"
            "    backup.kappa: 0.9\n"
        )
    lines = str(refused.value).splitlines()
    expected = {
        3: "did you mean 'critic.num_critics'?",
        4: "the range is empty: low 0.01 must be below high 0.0001",
        5: "low must be an integer; found 32.5",
        6: "the key may be min, mean, weighted",
        7: "found 'hihg'; did you mean 'high'?",
        8: "did you mean 'success'?",
        9: "acrlpd.target_update_tau must lie in (0, 1]; found 2.0",
        10: "at least two choices; found [5]",
        11: "the config's own value 16 is not among [8, 32]",
        12: "training.offline_steps is not searched",
        13: "log needs a low above 0; found 0.0",
        14: "found 'kappa'",
    }
    for number, text in expected.items():
        assert any(f"space.yaml:{number}: " in line and text in line for line in lines), (number, text, lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("critic_lr: [1e-3, 1e-2]\ncritic_lr_schedule.peak_lr: [1e-3, 2e-3]\n", "is given twice"),
        ("stages:\n  one: {batch_size: [32, 64]}\n  two: {batch_size: [64, 128]}\n", "is given twice"),
        ("stages:\n  one: {batch_size: [32, 64]}\ncritic_lr: [1e-3, 1e-2]\n", "outside of a stage"),
        ("stages:\n  ../one: {batch_size: [32, 64]}\n", "not a plain name"),
        ("{}", "searches nothing"),
        ("- pi0_lr\n", "must hold keys of a config"),
        ("pi0_lr: {low: 1\n", "not valid YAML"),
        ("batch_size: 64\n", "neither a range"),
        ("batch_size: [64, 64, 32]\n", "listed twice"),
    ],
)
def test_what_is_no_space_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_the_space_on_the_page_about_tuning_is_one_of_the_quick_start():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert [stage.name for stage in parse(text).stages] == ["learning_rates", "loss_weights", "candidates_and_critics"]


def test_the_end_of_a_schedule_moves_with_its_peak():
    """Otherwise a peak below the end would be no schedule, and the shape would change with the rate."""
    before, changed = CONFIG.actor_lr_schedule, with_values(CONFIG, {"pi0_lr": 2e-4, "critic.num_critics": 3})
    assert changed.actor_lr_schedule.peak_lr == 2e-4 != before.peak_lr
    assert changed.actor_lr_schedule.decay_lr == pytest.approx(2e-4 * before.decay_lr / before.peak_lr)
    assert changed.critic.num_critics == 3 != CONFIG.critic.num_critics
    assert validate_config(changed).errors == validate_config(CONFIG).errors


@pytest.mark.parametrize(
    "name", ("quickstart", "aloha", "debug", "dqc_cube_double", "quickstart_recap", "quickstart_dsrl")
)
def test_a_preset_has_a_default_space_around_its_own_values(name):
    config = get_config(name)
    space = default_space(config)
    assert space.stages[0].name == "learning_rates"
    assert parse_space(space.to_yaml(), "space.yaml", config) == space  # so nothing in it is refused


def test_values_of_the_config_are_read_by_short_names_and_for_kinds():
    assert read_value(CONFIG, "pi0_lr") == 1.5e-2
    assert read_value(CONFIG, "backup") == "implicit_value"
    changed = apply_config_overrides(CONFIG, {"backup": "best_of_n"})
    assert read_value(changed, "backup.type") == "best_of_n"


@settings(max_examples=30)
@given(
    st.lists(
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers(), max_size=3),
        min_size=2,
        unique_by=repr,
    )
)
def test_choices_survive_the_storage(values):
    choices = Choices(tuple(values))
    assert [from_param(choices, to_param(choices, value)) for value in values] == values
    assert all(value in choices for value in values)
