"""The chain a config makes: outputs undo inputs, batches equal samples, mistakes are named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, RLTrainConfig, get_config, list_configs
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DeltaActions,
    RepackTransform,
    TokenizePrompt,
    create_policy_transforms,
    create_statistics_transform,
)
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.aloha import Aloha
from acrlpd.robots.base import Robot, make_bool_mask
from acrlpd.robots.droid import Droid
from acrlpd.robots.generic import Generic
from acrlpd.robots.libero import Libero

HORIZON = 4
ROBOTS = {"aloha": (14, 14), "droid": (8, 8), "libero": (8, 7), "generic": (9, 9)}


def robot_of(name: str, *, adapt: bool) -> Robot:
    return {"aloha": Aloha(adapt_to_pi=adapt), "droid": Droid(), "libero": Libero(), "generic": Generic()}[name]


def rl_config(robot, *, pi05=False, adapt=False, delta=False, mask=None):
    state = ("joint_position", "gripper_position") if robot == "droid" else ("observation.state",)
    wrist = None if robot == "generic" else "wrist"
    return RLTrainConfig(
        name="test",
        model=Pi0Config(
            paligemma_variant="dummy",
            action_expert_variant="dummy",
            siglip_variant="mu/14",
            vocab_size=512,
            action_horizon=HORIZON,
            image_resolution=(28, 28),
            pi05=pi05,
            max_token_len=64,
        ),
        qchunking=QChunkingConfig(horizon_length=2, action_dim=ROBOTS[robot][1]),
        data=DataConfig(
            robot=robot_of(robot, adapt=adapt),
            repack=RepackConfig(base_0_rgb="top", left_wrist_0_rgb=wrist, state=state),
            use_delta_joint_actions=delta,
            delta_action_mask=mask,
            tokenizer="byte",
        ),
    )


def dataset_sample(robot, rng, batch_shape=()):
    state_dim, action_dim = ROBOTS[robot]
    state = rng.uniform(0.05, 0.95, (*batch_shape, state_dim))
    data = {"action": rng.uniform(-1, 1, (*batch_shape, HORIZON, action_dim))}
    if robot == "droid":
        data |= {"joint_position": state[..., :7], "gripper_position": state[..., 7:]}
    else:
        data |= {"observation.state": state}
    images = {name: rng.integers(0, 256, (*batch_shape, 20, 30, 3), np.uint8) for name in ("top", "wrist")}
    return data | images | {"prompt": np.full(batch_shape, "pick up the cube")}


def random_stats(state_dim, action_dim, rng):
    def stats(dim):
        q01 = rng.normal(size=dim)
        return NormStats(rng.normal(size=dim), rng.uniform(0.1, 2, dim), q01, q01 + rng.uniform(0.5, 3, dim))

    return {"state": stats(state_dim), "actions": stats(action_dim)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    robot=st.sampled_from(list(ROBOTS)),
    pi05=st.booleans(),
    adapt=st.booleans(),
    delta=st.booleans(),
)
def test_outputs_undo_inputs(seed, robot, pi05, adapt, delta):
    rng = np.random.default_rng(seed)
    config = rl_config(robot, pi05=pi05, adapt=adapt, delta=delta, mask=(6, -1, 2) if robot == "generic" else None)
    transforms = create_policy_transforms(config)
    norm_stats = random_stats(*ROBOTS[robot], rng)
    sample = dataset_sample(robot, rng)
    model_input = transforms.training_inputs(norm_stats)(sample)
    model_output = {"state": model_input["state"], "actions": model_input["actions"]}
    np.testing.assert_allclose(
        transforms.serving_outputs(norm_stats)(model_output)["actions"],
        sample["action"],
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("robot", list(ROBOTS))
@pytest.mark.parametrize("pi05", [False, True])
def test_a_batch_is_transformed_as_its_samples_are(robot, pi05):
    rng = np.random.default_rng(3)
    config = rl_config(robot, pi05=pi05, adapt=True, delta=True, mask=(3, -6) if robot == "generic" else None)
    chain = create_policy_transforms(config).training_inputs(random_stats(*ROBOTS[robot], rng))
    batch = dataset_sample(robot, rng, (5,))
    transformed = chain(batch)
    for i in range(5):
        single = chain({key: value[i] for key, value in batch.items()})
        assert set(single) == set(transformed)
        for key, value in single.items():
            if isinstance(value, dict):
                for name, leaf in value.items():
                    np.testing.assert_array_equal(transformed[key][name][i], leaf, err_msg=name)
            else:
                np.testing.assert_allclose(transformed[key][i], value, rtol=1e-12, err_msg=key)


def test_what_the_model_gets():
    rng = np.random.default_rng(0)
    config = rl_config("libero")
    out = create_policy_transforms(config).training_inputs(None)(dataset_sample("libero", rng, (2,)))
    slots = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert {key: image.shape for key, image in out["image"].items()} == dict.fromkeys(slots, (2, 28, 28, 3))
    assert {key: mask.tolist() for key, mask in out["image_mask"].items()} == {
        "base_0_rgb": [True, True],
        "left_wrist_0_rgb": [True, True],
        "right_wrist_0_rgb": [False, False],
    }
    assert not out["image"]["right_wrist_0_rgb"].any()
    assert out["state"].shape == (2, 32)
    assert out["actions"].shape == (2, HORIZON, 32)
    assert not out["actions"][..., 7:].any()
    assert out["tokenized_prompt"].shape == (2, 64)


def test_cameras_that_the_policy_is_not_given_are_dropped():
    config = rl_config("aloha")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, image_keys=("base_0_rgb",)))
    transforms = create_policy_transforms(config)
    assert transforms.cameras == {"base_0_rgb": "top"}
    sample = dataset_sample("aloha", np.random.default_rng(0))
    del sample["wrist"]
    assert list(transforms.training_inputs(None)(sample)["image"]) == ["base_0_rgb"]


def test_pi05_writes_the_normalised_state_into_the_prompt():
    config = rl_config("generic", pi05=True)
    chain = create_policy_transforms(config).training_inputs(
        {key: NormStats(np.zeros(9), np.ones(9), np.full(9, -2.0), np.full(9, 2.0)) for key in ("state", "actions")}
    )
    sample = dataset_sample("generic", np.random.default_rng(0))
    sample["observation.state"] = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    out = chain(sample)
    text = bytes((out["tokenized_prompt"][out["tokenized_prompt_mask"]][1:] - 3).tolist()).decode()
    assert text.startswith("Task: pick up the cube, State: 0 63 127 191 255 127")  # cut at 64 tokens


@given(hnp.arrays(np.float64, (3, 2, 5), elements=st.floats(-1e3, 1e3)), st.lists(st.booleans(), max_size=5))
def test_relative_actions_come_back(actions, mask):
    data = {"state": actions[:, 0] * 0.5 + 1, "actions": actions}
    relative = DeltaActions(tuple(mask))(data)
    np.testing.assert_array_equal(relative["actions"][..., len(mask) :], actions[..., len(mask) :])
    np.testing.assert_allclose(AbsoluteActions(tuple(mask))(relative)["actions"], actions, atol=1e-12)
    assert data["actions"] is actions


def test_a_mask_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="mask of relative actions has 9 dims, the state has 8 and the actions 7"):
        DeltaActions((True,) * 9)({"state": np.zeros(8), "actions": np.zeros((4, 7))})


def test_a_state_that_is_not_alohas_is_named():
    chain = create_policy_transforms(rl_config("aloha")).serving_inputs(None)
    with pytest.raises(ValueError, match=r"'state' of robot aloha has 14 dims; found shape \[7\]"):
        chain({"state": np.zeros(7), "images": {}, "prompt": "x"})


def test_bool_mask():
    assert make_bool_mask(2, -1, 0, 1) == (True, True, False, True)


def test_repack_names_the_missing_column():
    with pytest.raises(KeyError, match=r"'observation.stat'.*action, observation.state.*data.repack"):
        RepackTransform({"state": "observation.stat"})({"observation.state": 1, "action": 2})


def test_repack_concatenates_columns():
    data = {"a": np.ones((2, 3)), "b": np.zeros((2, 1)), "prompt": "p"}
    packed = RepackTransform({"state": ("a", "b"), "images": {"top": "a"}})(data)
    assert packed["state"].tolist() == [[1, 1, 1, 0]] * 2
    assert packed["images"]["top"] is data["a"]
    assert packed["prompt"] == "p"


def test_missing_prompt_is_named():
    tokenize = create_policy_transforms(rl_config("aloha")).model_inputs[1]
    assert isinstance(tokenize, TokenizePrompt)
    with pytest.raises(KeyError, match="default_prompt"):
        tokenize({"state": np.zeros(14)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"robot": Generic(), "use_delta_joint_actions": True, "delta_action_mask": None},
            "delta_action_mask",
        ),
        ({"robot": Droid()}, "a column for each of observation/joint_position, observation/gripper_position"),
        ({"tokenizer": "/nowhere/paligemma.model"}, r"/nowhere/paligemma.model.*"),
        (
            {"repack": RepackConfig(state=("observation.state", "action"))},
            r"\['action'\] as state and as actions",
        ),
        (
            {"robot": Libero(), "repack": RepackConfig(right_wrist_0_rgb="wrist")},
            "no camera for.*right_wrist",
        ),
    ],
)
def test_config_mistakes_are_named(change, message):
    config = rl_config("aloha")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **change))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        create_policy_transforms(config)


def test_a_vocabulary_that_is_too_small_is_refused():
    config = rl_config("aloha")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=100))
    with pytest.raises(ValueError, match="259 ids, the model's vocab_size is 100"):
        create_policy_transforms(config)


@pytest.mark.parametrize("name", sorted(list_configs()))
def test_every_preset_has_a_chain(name):
    config = get_config(name)
    data_config = dataclasses.replace(config.data, tokenizer="byte")
    config = dataclasses.replace(config, data=data_config, model=config.model.without_files())
    transforms = create_policy_transforms(config)
    assert set(transforms.cameras) <= set(getattr(config.model, "image_keys", ()))
    state_dims = [dim or 7 for dim in config.data.robot.state_dims.values()]
    data = {column: np.zeros((2, dim)) for column, dim in zip(config.data.repack.state, state_dims, strict=True)}
    data |= {column: np.zeros((2, 3, config.qchunking.action_dim)) for column in config.data.repack.actions}
    assert create_statistics_transform(config)(data)["actions"].shape[-1] == config.qchunking.action_dim
