"""Who learns from what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    assert_trees_close,
    compute_part,
    learned_parts,
    make_batch,
    make_config,
    quick_jit,
    random_like,
    with_parts,
)
from flax import nnx

from acrlpd.agents.improvements.awr import AWR
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.networks import Draws, draw
from acrlpd.config import LossWeights
from acrlpd.config.create_agent import create_agent

KEY = jax.random.key(7)


def build(config):
    shapes = jax.eval_shape(lambda key: create_agent(config, key), KEY)
    return random_like(shapes)


@functools.partial(quick_jit, static_argnames="names")
def _gradients(agent, batch, names):
    def loss(parts, name):
        return compute_part(with_parts(agent, parts), name, batch, KEY)[0]

    return [jax.grad(loss)(learned_parts(agent), name) for name in names]


def gradients(agent, batch, *names):
    """Gradients of losses with respect to everything in the agent that could have one."""
    return _gradients(agent, batch, names=names)


@functools.partial(quick_jit, static_argnums=2)
def evaluate(agent, batch, name):
    return compute_part(agent, name, batch, KEY)


def noise_of(batch) -> Draws:
    """The random numbers that every loss of an agent at step 0 uses, called with KEY."""
    _, draw_rng, _ = jax.random.split(jax.random.fold_in(KEY, 0), 3)
    return draw(draw_rng, batch, make_config().acrlpd)


def cut(actions):
    """What critics see: the first 3 steps and 2 dims."""
    return actions[..., :3, :2].reshape(*actions.shape[:-2], 6)


def largest(tree):
    return max((float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree)), default=0.0)


@pytest.fixture(scope="module")
def critic_config():
    return make_config(critic={"q_aggregation": "weighted"})


def test_critic_loss_trains_the_online_critics_alone(critic_config):
    agent, batch = build(critic_config), make_batch(critic_config, 8)
    [grads] = gradients(agent, batch, "critic")
    assert largest(grads["critics"].online) > 1e-3
    assert all(largest(leaf) > 0 for leaf in jax.tree.leaves(grads["critics"].online))
    assert largest(grads["critics"].target) == 0
    for name in ("policy_params", "ema_params", "temperature_params"):
        assert largest(grads[name]) == 0, name


@pytest.mark.parametrize("kind", ["awr", "best_of_n", "policy_gradient"])
def test_actor_loss_trains_the_policy_alone(kind):
    config = make_config(improvement=kind)
    [grads] = gradients(build(config), make_batch(config, 8), "actor")
    assert all(largest(leaf) > 0 for leaf in jax.tree.leaves(grads["policy_params"]))
    for name in ("critics", "ema_params", "temperature_params"):
        assert largest(grads[name]) == 0, name


def test_distillation_trains_the_one_step_policy_alone():
    config = make_config(improvement=Distillation(hidden_dims=(16,)))
    [grads] = gradients(build(config), make_batch(config, 8), "actor")
    assert all(largest(leaf) > 0 for leaf in jax.tree.leaves(grads.pop("improvement")))
    for name, parts in grads.items():
        assert largest(parts) == 0, name


def test_joint_gradient_is_the_weighted_sum_of_the_parts():
    config = make_config()
    agent, batch = build(config), make_batch(config, 8)
    agent = agent.replace(loss_weights=LossWeights(2.0, 3.0, 5.0, 7.0))
    joint, critic, actor, bc = gradients(agent, batch, "joint", "critic", "actor", "bc")
    for total, a, b in zip(*(jax.tree.leaves(g["policy_params"]) for g in (joint, actor, bc)), strict=True):
        np.testing.assert_allclose(total, 3 * a + 5 * b, rtol=1e-4, atol=1e-6)
    for total, c in zip(*(jax.tree.leaves(g["critics"]) for g in (joint, critic)), strict=True):
        np.testing.assert_allclose(total, 2 * c, rtol=1e-4, atol=1e-6)
    _, info = evaluate(agent, batch, "critic")
    [slope] = jax.tree.leaves(joint["temperature_params"])
    assert abs(float(slope)) > 0.1  # of a square: the loss has a slope where the temperature is not the candidates'
    np.testing.assert_allclose(jax.tree.leaves(critic["temperature_params"])[0], 0.0)
    assert float(info["alpha_loss"]) >= 0.5 * (float(slope) / 7) ** 2 - 1e-6  # the mean of squares and a squared mean


def test_awr_with_equal_advantages_is_cloning():
    """Critics that value every chunk alike: weights are equal, and so are the losses and gradients."""
    config = make_config(improvement="awr")
    agent, batch = build(config), make_batch(config, 8, all_valid=True)
    constant = jax.tree.map(jnp.zeros_like, agent.critics.online)
    agent = agent.replace(critics=agent.critics.replace(online=constant))
    actor, bc = (evaluate(agent, batch, name)[0] for name in ("actor", "bc"))
    np.testing.assert_allclose(actor, bc, rtol=1e-6)
    grads = gradients(agent, batch, "actor", "bc")
    for a, b in zip(*(jax.tree.leaves(g["policy_params"]) for g in grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


@quick_jit
def advantages_and_losses(agent, batch):
    draws = noise_of(batch)
    policy, ensemble = agent.policy(), agent.critics.online_ensemble
    context = policy.encode(batch.observations)
    candidates = policy.denoise(context, draws.candidate_noise, num_steps=2)
    seen = batch.observations
    q_data = jnp.min(ensemble(None, seen, cut(batch.actions)[:, None]), axis=-1)[:, 0]
    q_mean = jnp.mean(jnp.min(ensemble(None, seen, cut(candidates)), axis=-1), axis=1)
    losses = policy.flow_matching_loss(context, batch.actions, draws.flow_noise, draws.flow_time)
    return (q_data - q_mean) * batch.sequence_mask, losses


def awr_by_hand(agent, batch, weights_of):
    """The loss of AWR with candidates, values and the policy's own loss by hand, for weights from advantages [b]."""
    advantage, losses = map(np.asarray, advantages_and_losses(agent, batch))
    weights, valid = weights_of(advantage), np.asarray(batch.valid)
    return weights, np.sum(weights[:, None] * valid * losses) / np.sum(weights[:, None] * valid)


@pytest.mark.parametrize("clip_scale", ["spread", "values"])
def test_awr_is_cloning_weighted_by_exponentiated_advantage(clip_scale):
    """alpha in units of the batch's advantages, or the temperature of acrlpd in units of values."""
    own_alpha = 1.7 if clip_scale == "spread" else None
    awr = AWR(effective_share=None, temperature=own_alpha, weight_clip=1.5)
    config = make_config(improvement=awr)
    agent, batch = build(config), make_batch(config, 16, all_valid=True)
    louder = jax.tree.map(lambda x: 3 * x, agent.critics.online)  # so that advantages matter
    agent = agent.replace(critics=agent.critics.replace(online=louder))
    alpha = float(np.exp(jax.tree.leaves(agent.temperature_params)[0]))

    def weights_of(advantage):
        return np.minimum(np.exp(advantage / (own_alpha * advantage.std() if own_alpha else alpha)), 1.5)

    weights, expected = awr_by_hand(agent, batch, weights_of)
    assert np.any(weights == 1.5) and np.any(weights < 1.5)
    actor, info = evaluate(agent, batch, "actor")
    np.testing.assert_allclose(actor, expected, rtol=1e-5)
    np.testing.assert_allclose(info["actor_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(info["awr_weight_max"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(info["awr_effective_ratio"], weights.mean() ** 2 / (weights**2).mean(), rtol=1e-5)
    if own_alpha is None:
        important = make_config(improvement=awr, bc_importance_weighting=True, bc_importance_clip=1.5)
        cloning, _ = evaluate(agent.replace(algorithm=build(important).algorithm), batch, "bc")
        np.testing.assert_allclose(cloning, expected, rtol=1e-5)  # the same weights


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_the_weights_of_awr_leave_the_share_that_was_asked_for(scale):
    """Whatever the scale of the rewards: the last layer of the critics is the scale of their values."""
    config = make_config(improvement=AWR(effective_share=0.4))
    agent, batch = build(config), make_batch(config, 32, all_valid=True)
    online = agent.critics.online
    out = jax.tree.map(lambda x: scale * x, online["out"])
    online = nnx.merge_state(online, nnx.State({"out": out}))
    agent = agent.replace(critics=agent.critics.replace(online=online))

    def weights_of(advantage):
        scaled = advantage / advantage.std()
        alphas = np.geomspace(1e-2, 1e2, 200_001)
        low, high = 0, len(alphas) - 1  # bisection, as slow as can be
        while high - low > 1:
            middle = (low + high) // 2
            weights = np.exp((scaled - scaled.max()) / alphas[middle])
            share = weights.mean() ** 2 / np.mean(weights**2)
            low, high = (low, middle) if share > 0.4 else (middle, high)
        return np.exp((scaled - scaled.max()) / alphas[high])

    _, expected = awr_by_hand(agent, batch, weights_of)
    actor, info = evaluate(agent, batch, "actor")
    np.testing.assert_allclose(actor, expected, rtol=1e-3)
    np.testing.assert_allclose(info["awr_effective_ratio"], 0.4, rtol=1e-3)
    np.testing.assert_allclose(info["awr_weight_mean"], 1.0, rtol=1e-4)


def test_cloning_ignores_steps_outside_the_episode():
    config = make_config()
    agent, batch = build(config), make_batch(config, 8)
    assert 0 < float(jnp.mean(batch.valid)) < 1
    loss, _ = evaluate(agent, batch, "bc")

    def by_hand(agent):
        draws = noise_of(batch)
        policy = agent.policy()
        return policy.flow_matching_loss(
            policy.encode(batch.observations), batch.actions, draws.flow_noise, draws.flow_time
        )

    losses, valid = np.asarray(quick_jit(by_hand)(agent)), np.asarray(batch.valid)
    np.testing.assert_allclose(loss, np.sum(losses * valid) / np.sum(valid), rtol=1e-5)
    hard, _ = evaluate(build(make_config(bc_difficulty_weighting=True)), batch, "bc")
    weights = np.sum(losses * valid, axis=1, keepdims=True) / np.sum(valid, axis=1, keepdims=True)
    np.testing.assert_allclose(hard, np.sum(weights * losses * valid) / np.sum(weights * valid), rtol=1e-5)
    assert float(hard) > float(loss)


def test_policy_gradient_matches_finite_differences():
    config = make_config(improvement="policy_gradient", critic={"activation": "tanh"})
    agent, batch = build(config), make_batch(config, 4)

    def loss(params):
        return compute_part(agent.replace(policy_params=params), "actor", batch, KEY)[0]

    params = agent.policy_params
    value = quick_jit(loss)
    grads = quick_jit(jax.grad(loss))(params)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))

    def moved(step):
        return float(value(jax.tree.map(lambda p, d: p + step * d, params, direction)))

    # Two step sizes: the error of a central difference falls with their square, so extrapolate it away.
    coarse, fine = ((moved(h) - moved(-h)) / (2 * h) for h in (2e-2, 1e-2))
    np.testing.assert_allclose(slope, (4 * fine - coarse) / 3, rtol=5e-3)


def test_best_of_n_clones_the_best_candidate():
    config = make_config(improvement="best_of_n")
    agent, batch = build(config), make_batch(config, 6)

    def by_hand(agent):
        draws = noise_of(batch)
        policy, ensemble = agent.policy(), agent.critics.online_ensemble
        context = policy.encode(batch.observations)
        candidates = policy.denoise(context, draws.candidate_noise, num_steps=2)
        chunks = cut(candidates)
        q = jnp.min(ensemble(None, batch.observations, chunks), axis=-1)
        best = jnp.stack([candidates[b, jnp.argmax(q[b])] for b in range(6)])
        return jnp.mean(policy.flow_matching_loss(context, best, draws.actor_noise, draws.actor_time))

    np.testing.assert_allclose(evaluate(agent, batch, "actor")[0], quick_jit(by_hand)(agent), rtol=1e-5)


def test_critic_target_uses_the_best_candidate_and_the_target_critics():
    config = make_config()
    agent, batch = build(config), make_batch(config, 6, seed=2)
    _, info = evaluate(agent, batch, "critic")

    @quick_jit
    def values(agent):
        policy, seen = agent.policy(), batch.next_observations
        noise = noise_of(batch).next_noise
        candidates = cut(policy.denoise(policy.encode(seen), noise, num_steps=2))
        online = agent.critics.online_ensemble(None, seen, candidates)
        target = agent.critics.target_ensemble(None, seen, candidates)
        logged = agent.critics.online_ensemble(None, batch.observations, cut(batch.actions)[:, None])
        return online, target, logged

    online, target, logged = map(np.asarray, values(agent))
    rewards, valid, masks, weight = map(np.asarray, (batch.rewards, batch.valid, batch.masks, batch.sequence_mask))
    y = np.empty(6)
    for b in range(6):
        chosen = np.argmax(online[b].min(axis=-1))
        y[b] = sum(0.99**i * rewards[b, i] * valid[b, i] for i in range(3))
        y[b] += 0.99**3 * masks[b, -1] * target[b, chosen].min()
    q_data = logged[:, 0]
    loss = np.sum(weight * np.mean((q_data - y[:, None]) ** 2, axis=1)) / weight.sum()
    assert 0 < weight.sum() < 6
    np.testing.assert_allclose(info["critic_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(info["target_q_mean"], np.sum(weight * y) / weight.sum(), rtol=1e-5)
    np.testing.assert_allclose(info["q_mean"], np.sum(weight * q_data.mean(axis=1)) / weight.sum(), rtol=1e-5)
    assert np.any(masks[:, 0] != masks[:, -1])
    np.testing.assert_allclose(info["bootstrap_ratio"], np.sum(weight * masks[:, -1]) / weight.sum(), rtol=1e-5)
    choice = online.min(axis=-1)
    np.testing.assert_allclose(info["best_of_n_gain"], np.mean(choice.max(axis=1) - choice.mean(axis=1)), rtol=1e-4)
    np.testing.assert_allclose(info["candidate_q_std"], np.mean(choice.std(axis=1)), rtol=1e-4)
    share = np.exp(choice / float(info["alpha_value"]))
    share /= share.sum(axis=1, keepdims=True)
    entropy = -np.sum(share * np.log(share), axis=1) / np.log(4)
    np.testing.assert_allclose(info["choice_entropy"], np.mean(entropy), rtol=1e-4)


def test_members_learn_from_their_own_errors_alone():
    """Learned weights of the ensemble have a loss of their own; while they are equal, members learn as under "mean"."""
    weighted, mean = (build(make_config(critic={"q_aggregation": kind})) for kind in ("weighted", "mean"))
    logits = ("aggregation_logits",)
    members = {
        part: {path: leaf for path, leaf in nnx.to_flat_state(getattr(weighted.critics, part)) if path != logits}
        for part in ("online", "target")
    }
    equal = {part: nnx.from_flat_state(flat | {logits: nnx.Param(jnp.zeros(3))}) for part, flat in members.items()}
    weighted = weighted.replace(critics=weighted.critics.replace(**equal))
    plain = {part: nnx.from_flat_state(flat) for part, flat in members.items()}
    mean = mean.replace(policy_params=weighted.policy_params, critics=mean.critics.replace(**plain))
    batch = make_batch(make_config(), 8)
    found, expected = (
        dict(nnx.to_flat_state(gradients(agent, batch, "critic")[0]["critics"].online)) for agent in (weighted, mean)
    )
    assert largest(found.pop(logits)) > 0
    assert_trees_close(found, expected)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_disturbs_the_critics_that_learn(rate):
    """Without it, what critics say of logged chunks has nothing random in it."""
    config = make_config(critic={"dropout_rate": rate})
    agent, batch = build(config), make_batch(config, 8)
    value = quick_jit(lambda agent, key: compute_part(agent, "critic", batch, key)[1]["q_mean"])
    assert (float(value(agent, KEY)) != float(value(agent, jax.random.key(4)))) == (rate > 0)


def test_awr_leaves_out_what_the_critics_may_not_judge():
    """An advantage of 0 would be high where the policy is better than its data."""
    config = make_config(improvement=AWR(effective_share=0.4))
    agent, batch = build(config), make_batch(config, 32)
    unknown = np.asarray(batch.sequence_mask) == 0
    assert 0 < unknown.sum() < 32
    garbage = jnp.where(unknown[:, None, None], batch.actions + 1.0, batch.actions)
    (one, info), (other, _) = (evaluate(agent, batch.replace(actions=x), "actor") for x in (batch.actions, garbage))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(info["awr_effective_ratio"], 0.4, rtol=1e-3)  # of the windows that count


def test_samples_without_a_known_target_do_not_train_the_critic():
    config = make_config()
    agent, batch = build(config), make_batch(config, 8)
    unusable = batch.sequence_mask == 0
    assert bool(jnp.any(unusable))
    garbage = jnp.where(unusable[:, None], 1e6, batch.rewards)
    loss = quick_jit(lambda agent, batch: compute_part(agent, "critic", batch, KEY)[0])
    np.testing.assert_array_equal(loss(agent, batch), loss(agent, batch.replace(rewards=garbage)))


def test_padded_dims_and_later_steps_do_not_reach_the_critic():
    config = make_config()
    agent, batch = build(config), make_batch(config, 8)
    loss = quick_jit(lambda agent, batch: compute_part(agent, "critic", batch, KEY)[0])
    changed = batch.actions.at[:, 3:].add(7.0).at[..., 2:].add(7.0)
    np.testing.assert_array_equal(loss(agent, batch), loss(agent, batch.replace(actions=changed)))
    seen = batch.actions.at[:, 2, 1].add(7.0)
    assert float(loss(agent, batch)) != float(loss(agent, batch.replace(actions=seen)))
