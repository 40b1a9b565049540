"""Validation by held-out windows, against the same numbers computed window by window."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_agent import NORM_STATS, toy_agent, toy_config

from acrlpd.agents.networks import flow_times
from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.data.pipeline.held_out import HeldOutWindows
from acrlpd.evaluation.statistics import probability_above, rank_correlation
from acrlpd.evaluation.validation import DimError, Validation, Validator
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import acting_model, choose_actions
from acrlpd.policies.policy import create_policy

N = 37  # no multiple of the batches that the policy answers


def held_out_windows(config: RLTrainConfig) -> HeldOutWindows:
    """Random windows of three episodes: a success, a failure that ends with a terminal, and one without an end."""
    rng, steps, dims = np.random.default_rng(0), config.model.action_horizon, config.model.action_dim
    actions = rng.normal(size=(N, steps, dims)).astype(np.float32)
    episodes = np.arange(N) * 3 // N
    returns = rng.normal(size=N)
    returns[episodes == 2] = np.nan
    stats = NORM_STATS["actions"]
    return HeldOutWindows(
        observations=Observation({}, {}, rng.normal(size=(N, config.model.state_dim)).astype(np.float32)),
        actions=actions,
        valid=np.arange(steps) < rng.integers(1, steps + 1, (N, 1)),
        logged=(actions * (stats.std + 1e-6) + stats.mean).astype(np.float32),
        mean_action=np.broadcast_to(stats.mean, actions.shape).astype(np.float32),
        imitated=np.arange(N) % 5 != 0,
        returns=returns,
        leads_to_success=episodes == 0,
        episode_succeeds=episodes == 0,
        episode_id=episodes + 7,
        step_id=np.arange(N),
    )


def create_validator(config: RLTrainConfig) -> Validator:
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    return Validator(config, held_out_windows(config), NORM_STATS, NamedSharding(mesh, PartitionSpec("batch")))


def test_numbers_are_those_of_the_policy_that_acts(tmp_path: Path) -> None:
    config = toy_config(batch_size=16)
    agent, windows = toy_agent(config), held_out_windows(config)
    found = create_validator(config).judge(agent)
    assert (found.episodes, found.windows, found.candidates) == (3, N, 4)

    policy = create_policy(acting_model(agent, average=True), config, NORM_STATS)
    noise = np.stack([policy.noise(seed) for seed in range(N)])
    chosen = choose_actions(policy.model, windows.observations, noise, np.full(N, 4), num_steps=policy.num_steps)
    counted = windows.valid & windows.imitated[:, None]
    for kind, actions in {"best_of_n": chosen.actions, "sample": chosen.candidates[:, 0]}.items():
        in_units = policy.outputs({"state": windows.observations.state, "actions": np.asarray(actions)})["actions"]
        errors = np.abs(in_units - windows.logged)[counted].mean(axis=0)
        np.testing.assert_allclose([getattr(dim, kind) for dim in found.dims], errors, rtol=1e-4)
    mean_errors = np.abs(windows.mean_action - windows.logged)[counted].mean(axis=0)
    np.testing.assert_allclose([dim.mean_action for dim in found.dims], mean_errors, rtol=1e-5)
    values = np.asarray(chosen.q_values)
    assert found.best_of_n_gain == pytest.approx((values.max(1) - values.mean(1)).mean(), rel=1e-4)

    networks, rng = policy.model.networks(), np.random.default_rng(0)
    context = networks.encode(windows.observations)
    times = flow_times((rng.permutation(N) + 0.5) / N, config.acrlpd).astype(np.float32)
    flow_noise = rng.standard_normal(windows.actions.shape, np.float32)
    losses = networks.policy.flow_matching_loss(context, windows.actions, flow_noise, times)
    assert found.flow_loss == pytest.approx(np.asarray(losses)[counted].mean(), rel=1e-4)
    q = policy.model.algorithm.values(networks, context, windows.observations, windows.actions[:, None])
    q, known = np.asarray(q)[:, 0], np.isfinite(windows.returns)
    error = q[known] - windows.returns[known]
    assert found.calibration.rmse == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)
    expected = scipy.stats.spearmanr(q[known], windows.returns[known]).statistic
    assert found.rank_correlation == pytest.approx(expected, abs=1e-6)
    pairs = [a > b for a in q[windows.leads_to_success] for b in q[~windows.episode_succeeds]]
    assert found.success_auc == pytest.approx(np.mean(pairs))

    metrics = found.metrics()
    assert metrics["relative_action_error"] == pytest.approx(np.mean([d.sample / d.mean_action for d in found.dims]))
    assert {"action_error/0", "best_of_n_error/1", "q_rmse", "success_auc", "best_of_n_gain"} <= metrics.keys()
    assert create_validator(config).judge_at_step(agent, 40, tmp_path) == metrics  # nothing is left to chance
    record = json.loads((tmp_path / "40" / "validation.json").read_text())
    assert record["dims"][0]["sample"] == metrics["action_error/0"]
    shown = record["chunks"][1]
    row = shown["step"]
    assert shown["logged"] == pytest.approx(windows.logged[row][windows.valid[row]])


def test_without_critics_there_are_no_numbers_of_critics() -> None:
    without = {"acrlpd.loss_weights.critic_weight": 0.0, "acrlpd.loss_weights.actor_weight": 0.0}
    config = apply_config_overrides(toy_config(), without | {"acrlpd.learnable_temperature": False})
    found = create_validator(config).judge(toy_agent(config))
    unknown = (found.rank_correlation, found.success_auc, found.best_of_n_gain, found.calibration)
    assert unknown == (None, None, None, None) and found.candidates == 1
    assert set(found.metrics()) == {"flow_loss", "relative_action_error", "action_error/0", "action_error/1"}


def test_critics_of_noise_value_candidates_and_have_nothing_to_say_of_logged_chunks() -> None:
    of_noise = {"improvement": "dsrl_sac", "improvement.hidden_dims": (16,), "acrlpd.loss_weights.bc_weight": 0.0}
    config = apply_config_overrides(toy_config(), of_noise | {"acrlpd.learnable_temperature": False})
    agent, windows = toy_agent(config), held_out_windows(config)
    found = create_validator(config).judge(agent)
    assert (found.rank_correlation, found.success_auc, found.calibration) == (None, None, None)
    policy = create_policy(acting_model(agent, average=True), config, NORM_STATS)
    noise = np.stack([policy.noise(seed) for seed in range(N)])
    chosen = choose_actions(policy.model, windows.observations, noise, np.full(N, 4), num_steps=policy.num_steps)
    values = np.asarray(chosen.q_values)
    assert found.best_of_n_gain == pytest.approx((values.max(1) - values.mean(1)).mean(), rel=1e-4)
    networks = policy.model.networks()
    with pytest.raises(ValueError, match="the critics judge noise"):
        context = networks.encode(windows.observations)
        policy.model.algorithm.values(networks, context, windows.observations, windows.actions[:, None])


@pytest.mark.parametrize("rounding", [0.0, 3e-7])
def test_a_dim_that_does_not_move_hides_no_blind_policy(rounding: float) -> None:
    blind, still = DimError(1.0, 0.9, 1.0), DimError(1e-9, 1e-9, rounding)
    numbers = dict.fromkeys(["flow_loss", "calibration", "rank_correlation", "success_auc", "best_of_n_gain"])
    counts = {"episodes": 1, "windows": 1, "candidates": 1, "chunks": ()}
    found = Validation(dims=(blind, still, blind), **counts, **numbers)
    assert (found.error_ratio("sample"), found.error_ratio("best_of_n")) == (1.0, 0.9)
    assert Validation(dims=(still,), **counts, **numbers).error_ratio("sample") is None


def test_ranks_are_those_of_scipy_also_with_ties() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 4, 50), rng.integers(0, 4, 50)
    assert rank_correlation(first, second) == pytest.approx(scipy.stats.spearmanr(first, second).statistic)
    assert rank_correlation(first, first**3) == pytest.approx(1.0)
    u = scipy.stats.mannwhitneyu(first, second).statistic
    assert probability_above(first, second) == pytest.approx(u / 50**2)
    assert rank_correlation(first, np.ones(50)) is None and probability_above(first, first[:0]) is None
