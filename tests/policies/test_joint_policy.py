"""Several models act in one call: each as if it were alone, whatever the others see."""

import dataclasses

import jax
import numpy as np
import pytest
from toy_agent import NORM_STATS, toy_agent, toy_config

from acrlpd.agents.hyperparams import BestOfNConfig
from acrlpd.policies.acting_model import ActingModel, acting_model, choose_actions_of_models
from acrlpd.policies.policy import Policy, create_policy

NUM_MODELS, ROWS = 3, 2
PROMPTS = ["go right"] * NUM_MODELS * ROWS
SEEDS = [11, 12, 13, 14, 15, 16]
STATES = np.random.default_rng(0).normal(0.5, 0.3, (NUM_MODELS * ROWS, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def models() -> dict[int, ActingModel]:
    return {i: acting_model(toy_agent(toy_config(), seed=i), average=False) for i in range(NUM_MODELS)}


def policy_for(model: ActingModel, *, explores: bool) -> Policy:
    base = toy_config()
    selection = BestOfNConfig(top_k=3, selection_temperature=1e6)
    config = dataclasses.replace(base, acrlpd=dataclasses.replace(base.acrlpd, best_of_n=selection))
    return create_policy(model, config, NORM_STATS, explore=explores)


@pytest.mark.parametrize("kind", ["best", "exploring", "cloning"])
def test_every_model_acts_as_it_acts_alone(models: dict[int, ActingModel], kind: str) -> None:
    if kind == "cloning":
        models = {i: model.replace(critics=None) for i, model in models.items()}
    policy = policy_for(models[0], explores=kind == "exploring")
    joint = policy.with_models(models, NUM_MODELS)({"observation.state": STATES}, PROMPTS, SEEDS)
    assert joint.actions.shape == (NUM_MODELS * ROWS, 4, 2)
    for member, model in models.items():
        rows = slice(member * ROWS, (member + 1) * ROWS)
        alone = dataclasses.replace(policy, model=model)
        chunks = alone({"observation.state": STATES[rows]}, PROMPTS[rows], SEEDS[rows])
        np.testing.assert_allclose(joint.actions[rows], chunks.actions, atol=1e-5)
        assert set(joint.values) == set(chunks.values)
        for name, values in chunks.values.items():
            np.testing.assert_allclose(joint.values[name][rows], values, atol=1e-5, err_msg=name)


def test_a_models_rows_depend_on_nothing_of_the_others(models: dict[int, ActingModel]) -> None:
    """To the last bit: so a run is the same whoever rests beside it."""
    policy = policy_for(models[0], explores=False)
    everybody = policy.with_models(models, NUM_MODELS)({"observation.state": STATES}, PROMPTS, SEEDS)
    own = slice(ROWS, 2 * ROWS)
    states = np.repeat(STATES[ROWS : ROWS + 1], NUM_MODELS * ROWS, axis=0)
    states[own] = STATES[own]
    seeds = [99, 98, *SEEDS[own], 97, 96]
    compiled = choose_actions_of_models._cache_size()
    alone = policy.with_models({1: models[1]}, NUM_MODELS)({"observation.state": states}, PROMPTS, seeds)
    np.testing.assert_array_equal(alone.actions[own], everybody.actions[own])
    for name, values in everybody.values.items():
        np.testing.assert_array_equal(alone.values[name][own], values[own], err_msg=name)
    assert not np.array_equal(alone.actions[:ROWS], everybody.actions[:ROWS])
    assert choose_actions_of_models._cache_size() == compiled


def test_the_model_of_a_single_run_is_not_stacked(models: dict[int, ActingModel]) -> None:
    policy = policy_for(models[0], explores=False).with_models({0: models[1]}, 1)
    assert policy.num_models is None
    for found, wanted in zip(jax.tree.leaves(policy.model), jax.tree.leaves(models[1]), strict=True):
        assert found is wanted
