"""RECAP: the loss by hand, labels, dropout, what learns when, and guidance."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    assert_trees_identical,
    choose,
    make_batch,
    make_config,
    quick_call,
    quick_jit,
    random_agent,
    replace_acrlpd,
    tiny_pi0,
)

from acrlpd.agents import Agent
from acrlpd.agents.algorithm import prepare
from acrlpd.agents.improvements.base import SampleWeights
from acrlpd.agents.improvements.recap import RECAP
from acrlpd.batch import Batch
from acrlpd.config import LossWeights, RLTrainConfig
from acrlpd.evaluation.validation import answer
from acrlpd.models.observation import NEGATIVE, NO_LABEL, POSITIVE
from acrlpd.policies.acting_model import acting_model, choose_actions

KEY = jax.random.key(3)
SIZE = 16
BINS = np.linspace(-1, 0, 201)


def recap_config(*, guidance: float = 1.0, accumulation: int = 1) -> RLTrainConfig:
    return make_config(
        model=tiny_pi0(paligemma_variant="tiny", action_expert_variant="tiny", remat_policy="none"),
        improvement=RECAP(positive_share=0.4, guidance=guidance, hidden_dims=(16,)),
        loss_weights=LossWeights(critic_weight=0.0, actor_weight=0.7, bc_weight=0.0),
        learnable_temperature=False,
        learning_rate=1e-2,
        accumulation=accumulation,
        num_action_samples=1,
    )


@functools.cache
def build(accumulation: int = 1) -> Agent:
    config = recap_config(accumulation=accumulation)
    agent = random_agent(config)
    own = agent.improvement  # random moments of Adam would not be positive
    return agent.replace(
        loss_weights=config.acrlpd.loss_weights,
        policy_opt_state=agent.policy_optimizer.tx.init(agent.policy_params),
        improvement=own.replace(opt_state=agent.critic_optimizer.tx.init(own.params)),
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(recap_config(), SIZE)


def updated(agent: Agent, batch: Batch, *, update_policy: bool = True) -> tuple[Agent, dict[str, Any]]:
    step = jax.jit(lambda agent, batch: agent.train_step(batch, KEY, update_policy=update_policy))
    return quick_call(step, agent, batch)


@quick_jit
def value_logits(agent: Agent, observation: Any) -> jax.Array:
    networks = agent.networks()
    return networks.improvement(networks.encode(observation).features, observation)


def expected_losses(agent: Agent, batch: Batch) -> dict[str, Any]:
    """Labels and losses from the paper's words, one window at a time where windows are compared."""
    draws = prepare(agent, batch, jax.random.fold_in(KEY, agent.step)).draws
    logits, next_logits = (
        np.asarray(value_logits(agent, seen), np.float64) for seen in (batch.observations, batch.next_observations)
    )
    p, next_p = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (logits, next_logits))
    returns = jax.tree.map(np.asarray, batch.returns)
    bins = np.argmin(np.abs(BINS - returns.return_to_go[:, None]), axis=1)
    judge = -np.log(p[np.arange(SIZE), bins]) * returns.counts
    value, next_value = p @ BINS, next_p @ BINS
    advantage = returns.rewards + np.where(returns.continues > 0, next_value, -returns.fails) - value
    labels = []
    for k in range(SIZE):
        rivals = [j for j in range(SIZE) if batch.task_id[j] == batch.task_id[k] and returns.counts[j]]
        is_better = returns.counts[k] and sum(advantage[j] < advantage[k] for j in rivals) + 0.5 > 0.6 * len(rivals)
        labels.append(POSITIVE if is_better or returns.human[k] else NEGATIVE)
    shown = np.where((np.asarray(draws.label_noise) < 0.3) | (returns.counts == 0), NO_LABEL, labels)
    seen = batch.observations
    rows = np.arange(SIZE)
    tokens, masks = (
        np.where((shown == NO_LABEL)[:, None], plain, np.asarray(labelled)[rows, np.maximum(shown, 0)])
        for plain, labelled in (
            (seen.tokenized_prompt, seen.labelled_prompt),
            (seen.tokenized_prompt_mask, seen.labelled_prompt_mask),
        )
    )
    seen = seen.replace(tokenized_prompt=jnp.asarray(tokens), tokenized_prompt_mask=jnp.asarray(masks))

    @quick_jit
    def flow_losses(agent: Agent) -> jax.Array:
        context = agent.policy().encode(seen)
        return agent.policy().flow_matching_loss(context, batch.actions, draws.flow_noise, draws.flow_time)

    actor = float(jnp.sum(flow_losses(agent) * batch.valid) / jnp.sum(batch.valid))
    assert set(shown.tolist()) == {NEGATIVE, POSITIVE, NO_LABEL}
    positive = np.mean([label == POSITIVE for label, counts in zip(labels, returns.counts, strict=True) if counts])
    return {"judge_loss": judge.mean(), "actor_loss": actor, "positive_share": positive}


@pytest.fixture(scope="module")
def whole(batch: Batch) -> tuple[Agent, dict[str, Any]]:
    return updated(build(), batch)


def test_the_losses_are_those_of_the_paper(batch: Batch, whole: tuple[Agent, dict[str, Any]]) -> None:
    agent, info = whole
    expected = expected_losses(build(), batch)
    assert {name: float(info[name]) for name in expected} == pytest.approx(expected, rel=1e-4)
    total = 0.7 * (expected["actor_loss"] + expected["judge_loss"])
    assert float(info["total_loss"]) == pytest.approx(total, rel=1e-4)
    assert "bc_loss" not in info and "critic_loss" not in info
    assert float(info["improvement_grad_norm"]) > 0 and float(info["policy_grad_norm"]) > 0
    assert_trees_identical(agent.critics.online, build().critics.online)


def test_micro_batches_label_as_the_whole_batch(batch: Batch, whole: tuple[Agent, dict[str, Any]]) -> None:
    _, info = updated(build(4), batch)
    for name in ("judge_loss", "actor_loss", "positive_share", "policy_grad_norm", "improvement_grad_norm"):
        assert float(info[name]) == pytest.approx(float(whole[1][name]), rel=1e-3)


def test_the_value_learns_alone_first_and_becomes_the_mean_return(batch: Batch) -> None:
    """Where observations are equal, the distribution becomes that of their returns."""
    same = jax.tree.map(lambda x: x[jnp.arange(SIZE) % 2], batch.observations)  # two observations
    returns = batch.returns.replace(counts=jnp.ones(SIZE))
    batch = batch.replace(observations=same, returns=returns)
    agent, step = build(), jax.jit(lambda agent: agent.train_step(batch, KEY, update_policy=False)[0])
    step = step.lower(agent).compile(compiler_options={"xla_backend_optimization_level": 0})
    for _ in range(150):
        agent = step(agent)
    assert_trees_identical(agent.policy_params, build().policy_params)
    p = np.asarray(jax.nn.softmax(value_logits(agent, batch.observations)))
    rounded = np.round(np.asarray(returns.return_to_go) * 200) / 200
    for which in (0, 1):
        assert p[which] @ BINS == pytest.approx(rounded[which::2].mean(), abs=0.01)


def test_a_share_of_the_prompts_loses_its_label() -> None:
    method, size = RECAP(positive_share=0.3, label_dropout=0.25), 4000
    rng = np.random.default_rng(0)
    ones = jnp.ones(size)
    kept = {
        "advantage": jnp.asarray(rng.normal(size=size)),
        "task": jnp.zeros(size, jnp.int32),
        "counts": ones > 0,
        "human": jnp.asarray(np.arange(size) < 400),
        "dropped": jnp.asarray(rng.random(size) < 0.25),
    }
    label = np.asarray(method.balance(SampleWeights(ones, ones, kept)).kept["label"])
    assert (label == NO_LABEL).mean() == pytest.approx(0.25, abs=0.03)
    assert set(label[:400].tolist()) == {POSITIVE, NO_LABEL}
    shown = label[400:][label[400:] != NO_LABEL]
    assert (shown == POSITIVE).mean() == pytest.approx(0.3, abs=0.03)


NOISE = jax.random.normal(KEY, (SIZE, 1, 4, 8))


@pytest.fixture(scope="module")
def velocities(batch: Batch) -> list[np.ndarray]:
    """With the plain and with the positive prompt."""

    @quick_jit
    def velocity(agent: Agent, label: jax.Array) -> jax.Array:
        policy = agent.policy()
        return policy.velocity(policy.encode(batch.observations.with_label(label)), NOISE, jnp.ones((SIZE, 1)))

    plain, positive = (np.asarray(velocity(build(), jnp.full(SIZE, label))) for label in (NO_LABEL, POSITIVE))
    assert not np.allclose(plain, positive, atol=1e-3)
    return [plain, positive]


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_guidance_leads_away_from_the_plain_prompt(batch: Batch, velocities: list[np.ndarray], guidance: float) -> None:
    """In one Euler step a chunk is its noise minus the velocity, so the formula can be seen in the chunks."""
    agent = build()
    algorithm = dataclasses.replace(agent.algorithm, improvement=RECAP(guidance=guidance, hidden_dims=(16,)))
    model = acting_model(agent.replace(algorithm=algorithm), average=False)
    chosen = choose_actions(model, batch.observations, NOISE, jnp.ones(SIZE), num_steps=1)
    plain, positive = velocities
    expected = NOISE - (plain + guidance * (positive - plain))
    np.testing.assert_allclose(chosen.candidates, expected, rtol=1e-4, atol=1e-5)
    assert chosen.q_values is None
    # Validation judges the policy as it acts. At time 1 the loss is that of the velocities at the noise.
    judged = quick_jit(functools.partial(answer, num_steps=1))(
        model, batch.observations, batch.actions, NOISE[:, 0], jnp.ones(SIZE), NOISE
    )
    np.testing.assert_allclose(judged.sample, expected[:, 0], rtol=1e-4, atol=1e-5)
    losses = np.square(positive - (NOISE - batch.actions[:, None]))[:, 0].mean(axis=-1)
    np.testing.assert_allclose(judged.flow_losses, losses, rtol=1e-4)


def test_critics_beside_the_labels_choose_among_positive_candidates(batch: Batch) -> None:
    config = replace_acrlpd(recap_config(), num_action_samples=3, loss_weights=LossWeights(bc_weight=0.0))
    agent = random_agent(config)
    both = choose(agent, KEY, batch.observations)
    negative = batch.observations.replace(labelled_prompt=batch.observations.labelled_prompt.at[:, NEGATIVE].set(0))
    plain = batch.observations.replace(labelled_prompt=batch.observations.labelled_prompt.at[:, POSITIVE].set(0))
    np.testing.assert_array_equal(choose(agent, KEY, negative).candidates, both.candidates)
    assert not np.allclose(choose(agent, KEY, plain).candidates, both.candidates)
    assert both.q_values.shape == (SIZE, 3)
