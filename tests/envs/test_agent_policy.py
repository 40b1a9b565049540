"""An agent in an environment sees what it saw in training, and its actions come out in the right units."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from toy_agent import NORM_STATS, toy_agent, toy_config, toy_pi0_config
from toy_env import seeded_chunks

from acrlpd.config import OpenPICompatibilityConfig
from acrlpd.data.pipeline.batches import BatchBuilder
from acrlpd.data.pipeline.dataset import open_dataset, write_norm_stats
from acrlpd.data.sources.source import Feature
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs import EnvError, EnvPool, make_env, rollout_features, rollouts
from acrlpd.experts.demonstrations import write_rollout
from acrlpd.policies.agent_policy import (
    AgentPolicy,
    _best_of_n,
    _observation,
    create_agent_policy,
    policy_cameras,
)
from acrlpd.robots.base import DataDict


@pytest.fixture(scope="module")
def policy() -> AgentPolicy:
    config = toy_config()
    return create_agent_policy(toy_agent(config), config, NORM_STATS, make_env("toy", cameras=()).spec)


OBSERVATIONS = {"observation.state": np.array([[0.1, 0.0, 1.0], [0.7, 5.0, 1.0]], np.float32)}
PROMPTS = ["go right"] * 2


def test_the_policy_sees_what_training_saw(policy: AgentPolicy, tmp_path: Path) -> None:
    """Episodes written as a dataset and read as training batches, against the environment's own columns."""
    with EnvPool("toy", 2, num_workers=0) as envs:
        episodes = list(rollouts(envs, seeded_chunks, range(3), replan_steps=4, record=True))
        spec = envs.spec
    root = tmp_path / "toy"
    with LeRobotWriter(root, fps=spec.fps, features=rollout_features(spec), codec="h264") as writer:
        for episode in episodes:
            write_rollout(writer, episode, spec)
    base = toy_pi0_config()
    data = dataclasses.replace(
        base.data,
        data_dir=str(root),
        assets_dir=str(tmp_path / "assets"),
        episodes_per_memory_pool=0,  # decode what is asked for
    )
    config = dataclasses.replace(base, data=data)
    write_norm_stats(config)
    dataset = open_dataset(config)
    assert dataset.rewards.success.tolist() == [episode.succeeded for episode in episodes]
    steps = np.array([0, 2, episodes[2].length - 1])
    batch = BatchBuilder(dataset, config).build(np.arange(3), steps)

    policy = create_agent_policy(policy.agent, config, dataset.norm_stats, spec)  # only its transforms are used
    seen = {name: np.stack([episodes[i].observations[name][t] for i, t in enumerate(steps)]) for name in spec.features}
    prompts = np.array([episode.prompt for episode in episodes])
    acting = _observation(policy.model_inputs(policy.normalize({**seen, "prompt": prompts})))
    trained = batch.observations
    np.testing.assert_allclose(acting.state, trained.state, atol=1e-6)
    np.testing.assert_array_equal(acting.tokenized_prompt, trained.tokenized_prompt)
    np.testing.assert_array_equal(acting.image_masks["base_0_rgb"], trained.image_masks["base_0_rgb"])
    difference = acting.images["base_0_rgb"].astype(int) - trained.images["base_0_rgb"]
    assert acting.images["base_0_rgb"].shape == (3, 28, 28, 3)
    assert np.abs(difference).mean() < 6  # H.264

    # The actions of the data, given back by the policy's outputs, are those that were executed.
    outputs = policy.outputs({"state": trained.state, "actions": batch.actions})["actions"]
    for i, t in enumerate(steps):
        valid = int(batch.valid[i].sum())
        np.testing.assert_allclose(outputs[i, :valid], episodes[i].actions[t : t + valid], atol=1e-5)


def test_actions_are_in_the_environments_units_and_repeat(policy: AgentPolicy) -> None:
    chunks, again = policy(OBSERVATIONS, PROMPTS, 7), policy(OBSERVATIONS, PROMPTS, 7)
    assert chunks.actions.shape == (2, 4, 2)
    np.testing.assert_array_equal(chunks.actions, again.actions)
    assert not np.array_equal(chunks.actions, policy(OBSERVATIONS, PROMPTS, 8).actions)
    plain = dataclasses.replace(policy, outputs=lambda data: data)(OBSERVATIONS, PROMPTS, 7)
    expected = plain.actions * (NORM_STATS["actions"].std + 1e-6) + NORM_STATS["actions"].mean
    np.testing.assert_allclose(chunks.actions, expected, atol=1e-5)


def test_values_describe_the_choice(policy: AgentPolicy) -> None:
    one = dataclasses.replace(policy, num_samples=1)(OBSERVATIONS, PROMPTS, 0).values
    many = dataclasses.replace(policy, num_samples=16)(OBSERVATIONS, PROMPTS, 0).values
    np.testing.assert_allclose(one["q"], one["q_mean"], atol=1e-6)
    np.testing.assert_allclose(one["q_std"], 0.0, atol=1e-6)
    assert (many["q"] > many["q_mean"]).all() and (many["q_std"] > 0).all() and (many["action_std"] > 0).all()


def test_noise_disturbs_observations_or_actions_and_repeats(policy: AgentPolicy) -> None:
    calm = policy(OBSERVATIONS, PROMPTS, 3).actions
    seen = dataclasses.replace(policy, observation_noise=0.1)(OBSERVATIONS, PROMPTS, 3)
    moved = dataclasses.replace(policy, action_noise=0.1)
    noisy = moved(OBSERVATIONS, PROMPTS, 3)
    assert np.abs(seen.actions - calm).max() > 1e-4
    spread = (noisy.actions - calm) / NORM_STATS["actions"].std
    assert 0.02 < np.abs(spread).mean() < 0.3
    np.testing.assert_array_equal(noisy.actions, moved(OBSERVATIONS, PROMPTS, 3).actions)


def test_noise_on_pixels_is_a_share_of_their_range(policy: AgentPolicy) -> None:
    grey, seen = np.full((2, 28, 28, 3), 128, np.uint8), []

    def model_inputs(data: DataDict) -> DataDict:
        seen.append(data["image"]["base_0_rgb"])
        return policy.model_inputs(data)

    looking = dataclasses.replace(
        policy,
        normalize=lambda data: {**policy.normalize(data), "image": {"base_0_rgb": grey}},
        model_inputs=model_inputs,
        observation_noise=0.1,
    )
    looking(OBSERVATIONS, PROMPTS, 3)
    [image] = seen
    assert image.dtype == np.uint8
    assert image.std() == pytest.approx(25.5, rel=0.05)


@pytest.mark.parametrize(("prompt_from_task", "expected"), [(True, ["go right", "walk"]), (False, ["walk", "walk"])])
def test_the_prompt_is_the_task_where_training_used_it(
    policy: AgentPolicy, prompt_from_task: bool, expected: list[str]
) -> None:
    seen = []

    def normalize(data: DataDict) -> DataDict:
        seen.extend(data["prompt"].tolist())
        return policy.normalize(data)

    reading = dataclasses.replace(policy, normalize=normalize, prompt_from_task=prompt_from_task, default_prompt="walk")
    reading(OBSERVATIONS, ["go right", ""], 3)
    assert seen == expected


def test_a_new_agent_of_the_same_shape_compiles_nothing(policy: AgentPolicy) -> None:
    first = policy(OBSERVATIONS, PROMPTS, 0)
    compiled = _best_of_n._cache_size()
    other = dataclasses.replace(policy, agent=toy_agent(toy_config(), seed=1), action_noise=0.1)
    assert not np.array_equal(other(OBSERVATIONS, PROMPTS, 1).actions, first.actions)
    assert _best_of_n._cache_size() == compiled


def test_what_does_not_fit_is_refused_before_the_first_step(policy: AgentPolicy) -> None:
    config = toy_config()
    spec = make_env("toy").spec
    agent = policy.agent
    renamed = dataclasses.replace(
        config, data=dataclasses.replace(config.data, repack=dataclasses.replace(config.data.repack, state=("qpos",)))
    )
    with pytest.raises(EnvError, match=r"data\.repack names 'qpos', which environment 'toy' does not give"):
        create_agent_policy(agent, renamed, NORM_STATS, spec)
    wide = dataclasses.replace(spec, action_dim=3)
    with pytest.raises(EnvError, match=r"3 action dims, the config's qchunking\.action_dim is 2"):
        create_agent_policy(agent, config, NORM_STATS, wide)
    narrow = dataclasses.replace(spec, features=spec.features | {"observation.state": Feature("float32", (1,))})
    with pytest.raises(EnvError, match=r"a state of 1 dims .* the policy's norm statistics have 3"):
        create_agent_policy(agent, config, NORM_STATS, narrow)
    no_task = dataclasses.replace(config, data=dataclasses.replace(config.data, default_prompt=None))
    mute = create_agent_policy(agent, no_task, NORM_STATS, spec)
    with pytest.raises(EnvError, match=r"set data\.default_prompt"):
        mute(OBSERVATIONS, ["", ""], 0)


def test_only_the_policys_cameras_are_wanted() -> None:
    assert policy_cameras(toy_config()) == ()
    assert policy_cameras(toy_pi0_config()) == ("observation.images.side",)


def test_the_policy_that_acts_is_the_one_that_is_served() -> None:
    spec = make_env("toy", cameras=()).spec
    for enabled in (True, False):
        config = toy_config(openpi_compatibility=OpenPICompatibilityConfig(enable_ema_for_inference=enabled))
        assert create_agent_policy(toy_agent(config), config, NORM_STATS, spec).use_ema == enabled
