"""What pi0-FAST reads and learns from: openpi's prompt and tokens, in training alone, and errors with their fix."""

import dataclasses
import re

import numpy as np
import pytest

from acrlpd.config import apply_config_overrides, get_config, validate_config
from acrlpd.data.pipeline.action_tokens import ReportUndecodable
from acrlpd.data.pipeline.dataset_checks import require_action_tokens
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.transforms import create_policy_transforms
from acrlpd.models.fast_tokenizer import load_fast_tokenizer
from acrlpd.policies.acting_model import abstract_model
from acrlpd.policies.policy import create_policy

STATE, ACTIONS = np.zeros((2, 4)), np.random.default_rng(0).normal(0, 0.3, (2, 5, 3))


@pytest.fixture(scope="module")
def config():
    return get_config("debug_fast")


def tokenize(config, **data):
    inputs = create_policy_transforms(config).model_inputs_with(None)
    return inputs({"state": STATE, "prompt": np.array(["Pick_up the Cup ", "place it"]), **data})


def as_text(tokens):
    """The text of the byte tokenizer, in which FAST tokens are 639 - id and stand for themselves."""
    return "".join(chr(token - 3) if token < 259 else f"<{639 - token}>" for token in tokens)


def test_a_training_sample_is_openpis(config):
    data = tokenize(config, actions=ACTIONS)
    prompt = data["tokenized_prompt"][0][data["tokenized_prompt_mask"][0]]
    assert prompt[0] == 2
    assert as_text(prompt[1:]) == "Task: pick up the cup, State: 128 128 128 128;\n"
    assert data["action_tokens"].shape == (2, 32)
    for row, ids in enumerate(load_fast_tokenizer("byte").encode(ACTIONS)):
        tokens = data["action_tokens"][row]
        assert (tokens[-2:] == 0).all()
        text, end = tokens[tokens != 0][:-1], tokens[tokens != 0][-1]
        assert as_text(text) == "Action: " + "".join(f"<{number}>" for number in ids) + "|"
        assert end == 1


def test_a_batch_is_its_samples_and_a_client_has_no_tokens(config):
    whole = tokenize(config, actions=ACTIONS)
    inputs = create_policy_transforms(config).model_inputs_with(None)
    one = inputs({"state": STATE[1], "prompt": "place it", "actions": ACTIONS[1]})
    np.testing.assert_array_equal(one["action_tokens"], whole["action_tokens"][1])
    assert "action_tokens" not in tokenize(config)


def test_actions_are_written_after_normalisation(config):
    stats = NormStats(mean=np.zeros(3), std=np.ones(3), q01=np.full(3, -20.0), q99=np.full(3, 20.0))
    state = NormStats(mean=np.zeros(4), std=np.ones(4), q01=np.full(4, -1.0), q99=np.full(4, 1.0))
    inputs = create_policy_transforms(config).model_inputs_with({"actions": stats, "state": state})
    large = inputs({"state": STATE, "prompt": np.array(["a", "b"]), "actions": 20 * ACTIONS})
    np.testing.assert_array_equal(large["action_tokens"], tokenize(config, actions=ACTIONS)["action_tokens"])


@pytest.mark.parametrize(
    ("changes", "actions", "message"),
    [
        ({}, ACTIONS * 100, "action dim . is out of the range of the FAST tokenizer byte"),
        (
            {"model.max_action_tokens": 20},
            ACTIONS,
            "2 of 2 chunks need up to 25 tokens.*tokens is 20.*Raise",
        ),
        ({"model.vocab_size": 512}, ACTIONS, "actions have those from 128 on: raise model.vocab_size by 131"),
        ({"model.vocab_size": 300}, ACTIONS, "has no room for the 256 tokens"),
        ({"model.fast_tokenizer": "/nowhere"}, ACTIONS, "no FAST tokenizer in /nowhere.*acrlpd data fast_tokenizer"),
    ],
)
def test_what_cannot_be_learned_is_refused_at_the_start(config, changes, actions, message):
    sample = {"state": STATE, "actions": actions}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        require_action_tokens(sample, None, apply_config_overrides(config, changes))


def test_a_run_goes_on_without_the_chunks_that_cannot_be_written(caplog, config):
    """One outlier has no tokens; the chunk beside it has its own. Warnings come at 1 and at 10 of them."""
    inputs = create_policy_transforms(config).model_inputs_with(None)
    whole = inputs({"state": STATE, "prompt": "go", "actions": ACTIONS})["action_tokens"]
    assert not caplog.records
    for _ in range(12):
        data = inputs({"state": STATE, "prompt": "go", "actions": ACTIONS * [[[100]], [[1]]]})
    np.testing.assert_array_equal(data["action_tokens"], whole * [[0], [1]])
    assert [record.args[:2] for record in caplog.records] == [(1, 4), (10, 22)]
    assert "out of the range" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"improvement": "dsrl"}, "improvement dsrl steers the noise .* draws tokens: choose improvement awr"),
        ({"improvement": "dsrl_sac"}, "improvement dsrl_sac steers the noise"),
        ({"improvement": "policy_gradient"}, "needs a gradient from the chunk to the policy"),
        ({"improvement": "distillation"}, "learns the map from noise to chunks"),
        ({"improvement": "best_of_n"}, "clones candidates, of which only actions are known"),
        ({"improvement": "recap"}, "guides the flow with labels"),
        ({"improvement": "sac"}, "needs the probability of a chunk"),
        ({"model.temperature": 0}, "all 2 candidates of an observation would be equal: set model.temperature"),
        ({"acrlpd.flow_times": "uniform"}, "acrlpd.flow_times uniform is about flows"),
        ({"freeze_pi0_backbone": True}, "leave nothing of the pi0_fast policy to train"),
    ],
)
def test_settings_that_cannot_work_with_tokens(config, changes, message):
    errors = "\n".join(validate_config(apply_config_overrides(config, changes)).errors)
    assert re.search(message, errors), errors


@pytest.mark.parametrize(
    "changes",
    [
        {"improvement": "awr"},
        {"improvement": "expo"},
        {"backup": "implicit_value", "acrlpd.loss_weights.actor_weight": 0},
        {"acrlpd.loss_weights.critic_weight": 0, "acrlpd.loss_weights.actor_weight": 0, "model.temperature": 0},
    ],
)
def test_settings_that_work_with_tokens(config, changes):
    assert not validate_config(apply_config_overrides(config, changes)).errors


def test_released_weights_of_another_family_are_refused():
    config = apply_config_overrides(
        get_config("pi0_fast_libero"), {"weight_loader.path": "gs://openpi-assets/checkpoints/pi0_base/params"}
    )
    assert any("are not of pi0-FAST" in message for message in validate_config(config).errors)
    config = apply_config_overrides(
        get_config("libero"), {"weight_loader.path": "gs://openpi-assets/checkpoints/pi0_fast_base/params"}
    )
    assert any("are of pi0-FAST; set model pi0_fast" in message for message in validate_config(config).errors)


def test_chunks_that_are_none_are_counted_and_reported(caplog, config):
    transforms = create_policy_transforms(config)
    [report] = transforms.model_outputs
    assert isinstance(report, ReportUndecodable)
    actions = ACTIONS.copy()
    transforms.serving_outputs(None)({"state": STATE, "actions": actions})
    assert not caplog.records
    actions[1] = 0
    for _ in range(12):
        outputs = transforms.serving_outputs(None)({"state": STATE, "actions": actions})
    np.testing.assert_array_equal(outputs["actions"], actions)
    assert (report.count.chunks, report.count.failed) == (26, 12)
    assert [record.args for record in caplog.records] == [(1, 4), (10, 22)]
    assert not create_policy_transforms(get_config("debug")).model_outputs


def test_the_policy_acts_on_the_prompt_alone(config):
    """What a robot sends has no actions, so the policy sees no tokens of them."""
    policy = create_policy(abstract_model(config), config, None)
    data = {"state": STATE[0], "images": {"base_0_rgb": np.zeros((28, 28, 3), np.uint8)}, "prompt": "go"}
    observation = policy.observe(data)
    assert observation.action_tokens is None
    assert observation.tokenized_prompt.shape == (64,)
    assert dataclasses.replace(config.model).prompt_len == 64
