"""The policy sees what it saw in training, and its actions come out in the right units."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_agent import NORM_STATS, toy_agent, toy_config, toy_pi0_config
from toy_env import seeded_chunks

from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.config import OpenPICompatibilityConfig
from acrlpd.data.pipeline.batches import BatchBuilder
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.envs import EnvPool, rollout_features, rollouts
from acrlpd.execution.open_loop import OpenLoop
from acrlpd.experts.demonstrations import write_rollout
from acrlpd.policies.acting_model import acting_model, choose_actions
from acrlpd.policies.policy import Policy, create_policy
from acrlpd.robots.base import DataDict


@pytest.fixture(scope="module")
def policy() -> Policy:
    config = toy_config()
    return create_policy(acting_model(toy_agent(config), average=config.acts_with_average), config, NORM_STATS)


OBSERVATIONS = {"observation.state": np.array([[0.1, 0.0, 1.0], [0.7, 5.0, 1.0]], np.float32)}
PROMPTS = ["go right"] * 2


def test_the_policy_sees_what_training_saw(policy: Policy, tmp_path: Path) -> None:
    """Episodes written as a dataset and read as training batches, against the environment's own columns."""
    with EnvPool("toy", 2, num_workers=0) as envs:
        episodes = list(rollouts(envs, seeded_chunks, range(3), execution=OpenLoop(4), record=True))
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

    policy = create_policy(policy.model, config, dataset.norm_stats)  # only its transforms are used
    seen = {name: np.stack([episodes[i].observations[name][t] for i, t in enumerate(steps)]) for name in spec.features}
    prompts = np.array([episode.prompt for episode in episodes])
    acting = policy.observe(policy.repack({**seen, "prompt": prompts}))
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


def test_actions_are_in_the_environments_units_and_repeat(policy: Policy) -> None:
    chunks, again = policy(OBSERVATIONS, PROMPTS, [7, 7]), policy(OBSERVATIONS, PROMPTS, [7, 7])
    assert chunks.actions.shape == (2, 4, 2)
    np.testing.assert_array_equal(chunks.actions, again.actions)
    assert not np.array_equal(chunks.actions, policy(OBSERVATIONS, PROMPTS, [8, 8]).actions)
    plain = dataclasses.replace(policy, outputs=lambda data: data)(OBSERVATIONS, PROMPTS, [7, 7])
    expected = plain.actions * (NORM_STATS["actions"].std + 1e-6) + NORM_STATS["actions"].mean
    np.testing.assert_allclose(chunks.actions, expected, atol=1e-5)


def test_values_describe_the_choice(policy: Policy) -> None:
    one = dataclasses.replace(policy, best_of_n=1)(OBSERVATIONS, PROMPTS, [0, 0]).values
    many = dataclasses.replace(policy, best_of_n=16)(OBSERVATIONS, PROMPTS, [0, 0]).values
    np.testing.assert_allclose(one["q"], one["q_mean"], atol=1e-6)
    np.testing.assert_allclose(one["q_std"], 0.0, atol=1e-6)
    assert (many["q"] > many["q_mean"]).all() and (many["q_std"] > 0).all() and (many["action_std"] > 0).all()


def test_the_noise_of_an_observation_depends_on_neither_the_batch_nor_the_number_of_candidates(policy: Policy) -> None:
    both = policy(OBSERVATIONS, PROMPTS, [3, 4])
    for row, seed in enumerate((3, 4)):
        alone = {name: value[row : row + 1] for name, value in OBSERVATIONS.items()}
        np.testing.assert_allclose(policy(alone, PROMPTS[:1], [seed]).actions[0], both.actions[row], atol=1e-5)
    np.testing.assert_array_equal(policy.noise(3), dataclasses.replace(policy, best_of_n=16).noise(3)[:4])


def test_exploration_chooses_among_the_best_and_repeats() -> None:
    """With a high temperature both of the two best candidates are chosen, and never a third one."""
    base = toy_config()
    selection = BestOfNConfig(top_k=2, selection_temperature=1e6)
    config = dataclasses.replace(base, acrlpd=dataclasses.replace(base.acrlpd, best_of_n=selection))
    model = acting_model(toy_agent(config), average=config.acts_with_average)
    exploring = create_policy(model, config, NORM_STATS, explore=True)
    best = create_policy(model, config, NORM_STATS)
    n = 40
    states = {"observation.state": np.repeat(OBSERVATIONS["observation.state"][:1], n, axis=0)}
    seeds, prompts = list(range(n)), ["go right"] * n
    drawn, greedy = exploring(states, prompts, seeds), best(states, prompts, seeds)
    np.testing.assert_array_equal(drawn.actions, exploring(states, prompts, seeds).actions)
    is_best = np.isclose(drawn.values["q"], greedy.values["q"])
    assert (greedy.values["q"] == greedy.values["q_max"]).all() and 0.2 < is_best.mean() < 0.8
    observation = exploring.observe(exploring.repack({**states, "prompt": np.array(prompts)}))
    noise = np.stack([exploring.noise(seed) for seed in seeds])
    q_values = np.asarray(choose_actions(model, observation, noise, np.full(n, 4), num_steps=2).q_values)
    second = np.sort(q_values, axis=1)[:, -2]
    np.testing.assert_allclose(drawn.values["q"][~is_best], second[~is_best], atol=1e-5)
    # A choice follows from its observation's own seed, not from its place in the batch.
    turned = exploring(states, prompts, seeds[::-1])
    np.testing.assert_allclose(turned.actions[::-1], drawn.actions, atol=1e-5)


def test_a_config_that_does_not_explore_compiles_one_program(policy: Policy) -> None:
    exploring = create_policy(policy.model, toy_config(), NORM_STATS, explore=True)
    expected = policy(OBSERVATIONS, PROMPTS, [1, 2])
    compiled = choose_actions._cache_size()
    np.testing.assert_array_equal(exploring(OBSERVATIONS, PROMPTS, [1, 2]).actions, expected.actions)
    assert choose_actions._cache_size() == compiled


def test_noise_disturbs_observations_or_actions_and_repeats(policy: Policy) -> None:
    calm = policy(OBSERVATIONS, PROMPTS, [3, 3]).actions
    seen = dataclasses.replace(policy, observation_noise=0.1)(OBSERVATIONS, PROMPTS, [3, 3])
    moved = dataclasses.replace(policy, action_noise=0.1)
    noisy = moved(OBSERVATIONS, PROMPTS, [3, 3])
    assert np.abs(seen.actions - calm).max() > 1e-4
    spread = (noisy.actions - calm) / NORM_STATS["actions"].std
    assert 0.02 < np.abs(spread).mean() < 0.3
    np.testing.assert_array_equal(noisy.actions, moved(OBSERVATIONS, PROMPTS, [3, 3]).actions)


def test_noise_on_pixels_is_a_share_of_their_range(policy: Policy) -> None:
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
    looking(OBSERVATIONS, PROMPTS, [3, 3])
    [image] = seen
    assert image.dtype == np.uint8
    assert image.std() == pytest.approx(25.5, rel=0.05)


@pytest.mark.parametrize(("prompt_from_task", "expected"), [(True, ["go right", "walk"]), (False, ["walk", "walk"])])
def test_the_prompt_is_the_task_where_training_used_it(
    policy: Policy, prompt_from_task: bool, expected: list[str]
) -> None:
    seen = []

    def normalize(data: DataDict) -> DataDict:
        seen.extend(data["prompt"].tolist())
        return policy.normalize(data)

    data = dataclasses.replace(policy.rl_config.data, prompt_from_task=prompt_from_task, default_prompt="walk")
    config = dataclasses.replace(policy.rl_config, data=data)
    reading = dataclasses.replace(policy, normalize=normalize, rl_config=config)
    reading(OBSERVATIONS, ["go right", ""], [3, 4])
    assert seen == expected


def test_a_new_agent_of_the_same_shape_compiles_nothing(policy: Policy) -> None:
    first = policy(OBSERVATIONS, PROMPTS, [0, 0])
    compiled = choose_actions._cache_size()
    other = dataclasses.replace(
        policy,
        model=acting_model(toy_agent(toy_config(), seed=1), average=toy_config().acts_with_average),
        action_noise=0.1,
    )
    assert not np.array_equal(other(OBSERVATIONS, PROMPTS, [1, 1]).actions, first.actions)
    assert choose_actions._cache_size() == compiled


def test_an_environment_without_a_task_needs_a_prompt(policy: Policy) -> None:
    config = toy_config()
    no_task = dataclasses.replace(config, data=dataclasses.replace(config.data, default_prompt=None))
    mute = create_policy(policy.model, no_task, NORM_STATS)
    with pytest.raises(ValueError, match=r"set data\.default_prompt"):
        mute(OBSERVATIONS, ["", ""], [0, 1])


@pytest.mark.parametrize("length", [14, 15])
def test_a_long_prompt_is_cut_in_an_environment_and_refused_by_a_server(policy: Policy, length: int) -> None:
    """The policy reads 16 tokens, of which two are the ends of the prompt."""
    config = toy_pi0_config()
    cutting, refusing = (
        create_policy(policy.model, config, None, long_prompts=long_prompts) for long_prompts in ("cut", "refuse")
    )
    message = {"state": np.zeros(3), "images": {"base_0_rgb": np.zeros((8, 8, 3), np.uint8)}, "prompt": "a" * length}
    tokens = cutting.observe(message).tokenized_prompt
    assert tokens is not None and tokens.shape == (16,)
    if length == 14:
        np.testing.assert_array_equal(refusing.observe(message).tokenized_prompt, tokens)
    else:
        with pytest.raises(ValueError, match="prompt is too long: the policy reads 16 tokens"):
            refusing.observe(message)


def test_the_policy_that_acts_is_the_one_that_is_served() -> None:
    for enabled in (True, False):
        config = toy_config(openpi_compatibility=OpenPICompatibilityConfig(enable_ema_for_inference=enabled))
        agent = toy_agent(config)
        agent = agent.replace(ema_params=jax.tree.map(lambda x: 2 * x, agent.policy_params))
        model = acting_model(agent, average=config.acts_with_average)
        expected = agent.ema_params if enabled else agent.policy_params
        for found, wanted in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)
