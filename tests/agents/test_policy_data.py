"""What the policy is cloned from: a window that does not count leaves no trace in the policy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    assert_trees_close,
    assert_trees_identical,
    compute_part,
    make_batch,
    make_config,
    quick_jit,
)

from acrlpd.agents import Agent
from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.policy_data import exceeds_quantile
from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig
from acrlpd.config.create_agent import create_agent

KEY = jax.random.key(3)
SIZE = 16


@functools.cache
def make_agent(config: RLTrainConfig) -> Agent:
    return quick_jit(lambda key: create_agent(config, key))(jax.random.key(0))


@quick_jit
def train_step(agent: Agent, batch: Batch) -> tuple[Agent, dict[str, Any]]:
    return agent.train_step(batch, KEY)


def updated(config: RLTrainConfig, batch: Batch) -> tuple[Agent, dict[str, Any]]:
    return train_step(make_agent(config), batch)


def spoiled(batch: Batch, where: np.ndarray) -> Batch:
    """Other logged actions in some windows."""
    return batch.replace(actions=jnp.where(where[:, None, None], batch.actions + 1.0, batch.actions))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_failures_teach_the_critics_and_not_the_policy(accumulation: int) -> None:
    """Cloning and AWR learn the same whatever the actions of failures are; fixed values keep the advantages equal."""
    config = make_config(policy_data="success", accumulation=accumulation, learnable_temperature=False)
    batch = make_batch(config, SIZE, all_valid=True)
    failures = np.asarray(batch.leads_to_success) == 0
    assert 0 < failures.sum() < SIZE
    (one, info), (other, _) = updated(config, batch), updated(config, spoiled(batch, failures))
    assert_trees_identical(one.policy_params, other.policy_params)
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one.critics.online), jax.tree.leaves(other.critics.online), strict=True)
    )
    assert float(info["policy_data_ratio"]) == pytest.approx(1 - failures.mean())
    everything = dataclasses.replace(config, acrlpd=dataclasses.replace(config.acrlpd, policy_data="all"))
    (_, plain), (_, changed) = updated(everything, batch), updated(everything, spoiled(batch, failures))
    assert float(plain["bc_loss"]) != float(changed["bc_loss"])
    assert "policy_data_ratio" not in plain


def losses_of_single_windows(loss: Callable[[Batch], jax.Array], batch: Batch, field: str) -> list[float]:
    """The loss of the batch where `field` is above 0 for one window only, for each window."""
    return [float(loss(batch.replace(**{field: jnp.asarray(window)}))) for window in np.eye(SIZE, dtype=np.float32)]


def test_cloning_is_the_mean_over_the_windows_that_count() -> None:
    config = make_config(policy_data="success")
    batch, agent = make_batch(config, SIZE), make_agent(config)
    loss = quick_jit(lambda batch: compute_part(agent, "bc", batch, KEY)[1]["bc_loss"])
    single = losses_of_single_windows(loss, batch, "leads_to_success")
    steps = np.sum(batch.valid, axis=1) * np.asarray(batch.leads_to_success)
    np.testing.assert_allclose(loss(batch), np.average(single, weights=steps), rtol=1e-5)


def test_importance_leaves_out_what_the_critics_may_not_judge() -> None:
    """An advantage of 0 would be high where V is, for example, the best of the data."""
    config = make_config(
        bc_importance_weighting=True, backup=ImplicitValue(hidden_dims=(16,)), learnable_temperature=False
    )
    batch, agent = make_batch(config, SIZE), make_agent(config)
    unknown = np.asarray(batch.sequence_mask) == 0
    assert 0 < unknown.sum() < SIZE
    loss = quick_jit(lambda batch: compute_part(agent, "bc", batch, KEY)[1])
    one, other = loss(batch), loss(spoiled(batch, unknown))
    np.testing.assert_allclose(one["bc_loss"], other["bc_loss"], rtol=1e-6)
    np.testing.assert_allclose(one["awr_weight_mean"], other["awr_weight_mean"], rtol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_batch_without_a_success_moves_the_critics_alone(accumulation: int) -> None:
    config = make_config(policy_data="success", accumulation=accumulation, bc_importance_weighting=True)
    batch = make_batch(config, SIZE).replace(leads_to_success=jnp.zeros(SIZE))
    agent, info = updated(config, batch)
    assert {name for name, value in info.items() if not np.isfinite(value)} == set()
    assert float(info["bc_loss"]) == float(info["actor_loss"]) == float(info["policy_grad_norm"]) == 0.0
    assert float(info["critic_grad_norm"]) > 0
    assert_trees_identical(agent.policy_params, make_agent(config).policy_params)


def brute_force(advantage: np.ndarray, batch: Batch, quantile: float) -> list[bool]:
    """A window counts if it has more than this share of the judged windows of its task below it, itself by half."""
    found = []
    for k in range(len(advantage)):
        rivals = [j for j in range(len(advantage)) if batch.task_id[j] == batch.task_id[k] and batch.sequence_mask[j]]
        place = sum(1.0 if advantage[j] < advantage[k] else 0.5 * (advantage[j] == advantage[k]) for j in rivals)
        found.append(bool(batch.sequence_mask[k]) and place > quantile * len(rivals))
    return found


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.7, 0.9])
def test_the_quantile_is_that_of_the_task(quantile: float) -> None:
    batch = make_batch(make_config(), 41)
    batch = batch.replace(task_id=jnp.asarray(np.arange(41) % 3, jnp.int32))
    rng = np.random.default_rng(1)
    # The tasks differ in their scale.
    advantage = (10.0 * (np.arange(41) % 3) + rng.normal(size=41)).astype(np.float32)
    found = np.asarray(exceeds_quantile(jnp.asarray(advantage), batch.task_id, batch.sequence_mask > 0, quantile))
    assert found.tolist() == brute_force(advantage, batch, quantile)
    for task in range(3):
        judged = np.asarray(batch.sequence_mask)[np.arange(41) % 3 == task].sum()
        assert found[np.arange(41) % 3 == task].sum() == pytest.approx((1 - quantile) * judged, abs=1)


def test_micro_batches_compare_with_the_whole_batch() -> None:
    configs = [make_config(policy_data="advantage", accumulation=steps, learning_rate=1e-2) for steps in (1, 4)]
    batch = make_batch(configs[0], SIZE)
    (one, info), (other, same) = (updated(config, batch) for config in configs)
    assert 0 < float(info["policy_data_ratio"]) < 0.4
    assert float(info["policy_data_ratio"]) == float(same["policy_data_ratio"])
    np.testing.assert_allclose(info["bc_loss"], same["bc_loss"], rtol=1e-4)
    assert_trees_close(one.policy_params, other.policy_params, rtol=1e-3, atol=1e-4)


def test_the_critics_loss_follows_the_importance() -> None:
    config = make_config()
    batch, agent = make_batch(config, SIZE, all_valid=True), make_agent(config)
    loss = quick_jit(lambda batch: compute_part(agent, "critic", batch, KEY)[1]["critic_loss"])
    single = losses_of_single_windows(loss, batch, "importance")
    for importance in (np.ones(SIZE), np.random.default_rng(0).uniform(0.2, 3.0, SIZE), np.linspace(0.01, 0.02, SIZE)):
        weighted = batch.replace(importance=jnp.asarray(importance, jnp.float32))
        np.testing.assert_allclose(loss(weighted), np.average(single, weights=importance), rtol=1e-4)
