"""Candidates are the same however they are computed, and the right one is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import choose, make_config, quick_jit, random_like, tiny_pi0

from acrlpd.agents.best_of_n import candidate_bytes, mean_distance, sample_candidates, select
from acrlpd.config import BestOfNConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.policy import draw_noise
from acrlpd.policies.acting_model import acting_model, choose_actions

N = 12


def build(config):
    shapes = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
    return random_like(shapes, scale=0.1), config.model.fake_obs(3)


@pytest.fixture(scope="module")
def agent():
    return build(make_config(num_action_samples=N))


def with_best_of_n(agent, **fields):
    hyperparams = agent.algorithm.acrlpd
    hyperparams = type(hyperparams)(**{**vars(hyperparams), "best_of_n": BestOfNConfig(**fields)})
    algorithm = type(agent.algorithm)(hyperparams, agent.algorithm.qchunking)
    return agent.replace(algorithm=algorithm)


@pytest.mark.parametrize(("model", "top_k"), [("state", 1), ("state", 3), ("pi0", 1)])
def test_strategies_choose_the_same_actions(model, top_k):
    config = make_config(num_action_samples=N)
    if model == "pi0":
        config = make_config(num_action_samples=N, model=tiny_pi0())
    agent, observation = build(config)
    sample = quick_jit(lambda agent, seen: choose(agent, jax.random.key(1), seen))
    results = {
        strategy: sample(with_best_of_n(agent, strategy=strategy, chunk_size=5, top_k=top_k), observation)
        for strategy in (("parallel", "chunked") if model == "pi0" else ("parallel", "chunked", "sequential"))
    }
    expected = results.pop("parallel")
    assert expected.candidates.shape[:2] == (3, N)
    assert len(np.unique(np.asarray(expected.q_values))) == 3 * N  # otherwise the choice says nothing
    for result in results.values():
        np.testing.assert_array_equal(result.index, expected.index)
        np.testing.assert_allclose(result.candidates, expected.candidates, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.q_values, expected.q_values, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.actions, expected.actions, rtol=1e-4, atol=1e-5)


def test_best_of_n_returns_the_candidate_with_the_largest_value(agent):
    agent, observation = agent
    result = quick_jit(lambda a, key: choose(a, key, observation))(agent, jax.random.key(2))
    for b in range(3):
        best = int(np.argmax(result.q_values[b]))
        assert int(result.index[b]) == best
        np.testing.assert_array_equal(result.actions[b], result.candidates[b, best])


def test_the_moving_average_acts_if_asked_for(agent):
    agent, observation = agent
    sample = quick_jit(
        lambda agent, average: choose(agent, jax.random.key(2), observation, average=average).actions,
        static_argnames="average",
    )
    average, online = sample(agent, True), sample(agent, False)
    moved = agent.replace(policy_params=agent.ema_params)
    np.testing.assert_array_equal(average, sample(moved, False))
    assert not np.allclose(average, online)


def test_values_are_those_of_the_online_critics_on_the_candidates(agent):
    agent, observation = agent
    agent = with_best_of_n(agent, diversity_weight=1.0)  # values are reported without the bonus
    result = quick_jit(lambda a: choose(a, jax.random.key(2), observation, num_samples=2))(agent)
    policy = agent.replace(policy_params=agent.ema_params).policy()
    context = policy.encode(policy.preprocess(None, observation, train=False))
    ensemble = agent.critics.online_ensemble
    chunks = result.candidates[:, :, :3, :2].reshape(3, 2, 6)
    expected = jnp.min(ensemble(context.features, observation, chunks), axis=-1)
    np.testing.assert_allclose(result.q_values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "chunk_size", "expected"),
    [("parallel", 1, 12), ("sequential", 12, 1), ("chunked", 12, 12), ("chunked", 5, 4), ("chunked", 1, 1)],
)
def test_how_many_at_once(strategy, chunk_size, expected):
    config = BestOfNConfig(strategy=strategy, chunk_size=chunk_size)
    assert candidates_at_once(*_shapes(n=12), config, data_shards=1) == expected


def test_auto_stays_within_its_memory_estimate():
    policy, context, noise = _shapes(n=32)
    each = candidate_bytes(policy, context, noise)
    # Each hidden activation is [b, 64] float32, and a layer reads one and writes one.
    assert 2 * 256 * 64 * 4 <= each <= 6 * 256 * 64 * 4
    sizes = {}
    for shards in (1, 4):
        config = BestOfNConfig(memory_limit_mib=1)
        sizes[shards] = candidates_at_once(policy, context, noise, config, data_shards=shards)
        assert sizes[shards] * each / shards <= 2**20
        assert 2 * sizes[shards] * each / shards > 2**20 or sizes[shards] == 32
    assert sizes[1] < sizes[4]
    generous = BestOfNConfig(memory_limit_mib=1024)
    assert candidates_at_once(policy, context, noise, generous, data_shards=1) == 32


def test_top_k_draws_by_value_and_temperature():
    q = jnp.asarray([[0.0, 2.0, 1.0, -5.0]])
    chunks = jnp.arange(4.0).reshape(1, 4, 1)

    def shares(temperature, learned):
        config = BestOfNConfig(top_k=3, selection_temperature=temperature)
        draw = jax.vmap(lambda key: select(q, rng=key, config=config, temperature=learned, critic_chunks=chunks)[0])
        index = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
        return np.bincount(index, minlength=4) / len(index)

    weights = np.exp(np.asarray([0.0, 2.0, 1.0]) / 0.8)
    expected = np.append(weights / weights.sum(), 0.0)
    np.testing.assert_allclose(shares(0.8, jnp.asarray(99.0)), expected, atol=0.03)
    np.testing.assert_allclose(shares(None, jnp.asarray(0.8)), expected, atol=0.03)  # the learned alpha
    np.testing.assert_allclose(shares(1e-3, jnp.asarray(1.0)), [0, 1, 0, 0], atol=1e-6)


def test_diversity_bonus_prefers_the_outlier():
    chunks = jnp.asarray([[[0.0], [0.1], [5.0]]])
    np.testing.assert_allclose(mean_distance(chunks), [[(0.1 + 5.0) / 2, (0.1 + 4.9) / 2, (5.0 + 4.9) / 2]], rtol=1e-6)
    q = jnp.asarray([[1.0, 0.0, 0.9]])

    def choose(weight):
        config = BestOfNConfig(diversity_weight=weight)
        return select(q, rng=jax.random.key(0), config=config, temperature=jnp.ones(()), critic_chunks=chunks).tolist()

    assert choose(0.0) == [0]
    assert choose(1.0) == [2]


def candidates_at_once(policy, context, noise, config, data_shards):
    """How many candidates `sample_candidates` hands to the policy together."""
    sizes = set()

    class Recorder:
        velocity = policy.velocity

        def denoise(self, context, noise, *, num_steps):
            sizes.add(noise.shape[1])
            return noise

    def sample(context, noise):
        return sample_candidates(Recorder(), context, noise, num_steps=1, config=config, data_shards=data_shards)

    assert jax.eval_shape(sample, context, noise).shape == noise.shape
    [size] = sizes
    return size


def _shapes(n):
    config = StateFlowPolicyConfig(state_dim=3, action_dim=2, action_horizon=2, hidden_dims=(64, 64))
    policy = config.create(jax.random.key(0))
    context = jax.eval_shape(policy.encode, config.inputs_spec(256)[0])
    return policy, context, jax.ShapeDtypeStruct((256, n, 2, 2), jnp.float32)


@pytest.mark.parametrize("has_critics", [True, False])
def test_candidates_stay_within_the_bounds_of_the_robot(has_critics):
    agent, observation = build(make_config(action_bounds=(-0.5, 0.25)))
    model = acting_model(agent, average=False)
    model = model if has_critics else model.replace(critics=None)
    policy = agent.policy()
    noise = 5 * draw_noise(jax.random.key(0), (3, N, policy.action_horizon, policy.action_dim))
    chosen = choose_actions(model, observation, noise, jnp.full(3, N), num_steps=2)
    assert (chosen.candidates.min(), chosen.candidates.max()) == (-0.5, 0.25)
    assert np.isin(chosen.actions, chosen.candidates).all()
