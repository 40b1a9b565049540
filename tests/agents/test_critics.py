"""The batched ensemble against single networks written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import make_config, quick_jit, random_like
from flax import nnx

from acrlpd.agents.critics.base import keep_members
from acrlpd.agents.networks import create_critic_networks
from acrlpd.config import MLPCritics
from acrlpd.config.create_agent import create_agent
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Features

FEATURES, STATE, CHUNK = 7, 4, 6
LENGTHS = (5, 3, 1, 2, 4)  # tokens of each sample that are no padding

_ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
}


def build(**changes):
    config = MLPCritics(**{"num_critics": 3, "hidden_dims": (8, 5), **changes})
    critics = jax.eval_shape(
        lambda key: create_critic_networks(config, key, feature_dim=FEATURES, state_dim=STATE, chunk_dim=CHUNK),
        jax.random.key(0),
    )
    # Biases and norms start at 0 and 1, where mistakes hide.
    return critics.replace(online=random_like(critics.online, 1), target=random_like(critics.target, 2))


def inputs(b=5, n=3):
    """Features, observations and chunks."""
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(b, max(LENGTHS), FEATURES)) * 3 + 1
    features = Features(jnp.asarray(tokens, jnp.float32), jnp.asarray(np.resize(LENGTHS, b), jnp.int32))
    state = jnp.asarray(rng.normal(size=(b, STATE)), jnp.float32)
    return features, Observation({}, {}, state), jnp.asarray(rng.normal(size=(b, n, CHUNK)), jnp.float32)


def standardize(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6)


def read(config, params, tokens):
    """What the critics read of the tokens of one sample, in float64."""
    if config.pooling == "mean":
        return standardize(tokens.mean(axis=0))
    tokens = np.stack([standardize(token) for token in tokens])
    pooled = []
    for query, value in zip(params["queries"], params["values"], strict=True):
        weights = np.exp(tokens @ query / math.sqrt(FEATURES))
        pooled.append(weights / weights.sum() @ tokens @ value)
    return standardize(np.concatenate(pooled))


def reference(critics, features, observation, chunks, member):
    """One member, one sample and one candidate at a time, in float64."""
    config = critics.online_ensemble.config
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(critics.online))
    pool = params.pop("reader", {}).get("pool")
    p = jax.tree.map(lambda x: x[member], params)
    act = _ACTIVATIONS[config.activation]
    tokens, state, chunks = (np.asarray(x, np.float64) for x in (features.tokens, observation.state, chunks))

    out = np.empty(chunks.shape[:2])
    for b, n in np.ndindex(*out.shape):
        seen = read(config, pool, tokens[b, : features.length[b]]) if config.use_pi0_features else None
        if not config.use_pi0_features:
            observation = state[b]
        elif config.feature_fusion_method == "concat":
            observation = np.concatenate([seen, state[b]])
        elif config.feature_fusion_method == "add":
            observation = seen @ p["feature_in"]["kernel"] + p["feature_in"]["bias"]
            observation = observation + state[b] @ p["state_in"]["kernel"] + p["state_in"]["bias"]
        else:
            both = np.concatenate([seen, state[b]])
            observation = act(both @ p["fusion"]["kernel"] + p["fusion"]["bias"])
        kernel = np.concatenate([p["observation_kernel"], p["chunk_kernel"]])
        x = np.concatenate([observation, chunks[b, n]]) @ kernel + p["bias"]
        for layer in range(2):
            if layer:
                x = x @ p["hidden"][0]["kernel"] + p["hidden"][0]["bias"]
            x = act(x)
            if config.use_layer_norm:
                x = standardize(x) * p["norms"][layer]["scale"] + p["norms"][layer]["bias"]
        out[b, n] = (x @ p["out"]["kernel"] + p["out"]["bias"])[0]
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "mean"},
        {"activation": "relu", "use_layer_norm": False},
        {"activation": "swish", "feature_fusion_method": "add"},
        {"activation": "tanh", "feature_fusion_method": "mlp", "pooling": "mean"},
        {"use_pi0_features": False},
    ],
    ids=str,
)
def test_every_member_is_a_network_of_its_own(changes):
    critics = build(**changes)
    features, observation, chunks = inputs()
    q = quick_jit(lambda *x: critics.online_ensemble(*x))(features, observation, chunks)
    assert q.shape == (5, 3, 3)
    for member in range(3):
        expected = reference(critics, features, observation, chunks, member)
        np.testing.assert_allclose(q[..., member], expected, rtol=1e-4, atol=1e-5)


def test_aggregations():
    q = jnp.asarray([[1.0, 4.0, 2.0], [0.0, -1.0, 5.0]])
    assert build(q_aggregation="min").online_ensemble.aggregate(q).tolist() == [1.0, -1.0]
    np.testing.assert_allclose(build(q_aggregation="mean").online_ensemble.aggregate(q), [7 / 3, 4 / 3], rtol=1e-6)
    weighted = build(q_aggregation="weighted").online_ensemble
    logits = np.asarray(weighted.aggregation_logits[...])
    weights = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(weighted.aggregate(q), np.asarray(q) @ weights, rtol=1e-6)


def test_targets_can_use_a_random_subset():
    q = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
    ensemble = build(num_critics=5, q_aggregation="min", target_subset_size=2).online_ensemble
    keys = jax.random.split(jax.random.key(0), 300)
    values = np.asarray(quick_jit(jax.vmap(lambda key: ensemble.aggregate_target(q, key)))(keys))
    # The smaller of two different members: never the largest, and each at its share of the 10 pairs.
    shares = [np.mean(values == value) for value in (1, 2, 3, 4, 5)]
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.2, 0.1, 0.0], atol=0.09)
    assert shares[-1] == 0
    everyone = build(num_critics=5, q_aggregation="min").online_ensemble
    assert float(everyone.aggregate_target(q, keys[0])) == 1.0


def test_fewer_members_value_chunks_as_they_did_among_all():
    """An export keeps some members; the reader is shared, so it stays whole."""
    critics, members = build(pooling="attention"), np.array([0, 2])
    fewer = nnx.merge(build(num_critics=2, pooling="attention").network, keep_members(critics.online, members))
    every = quick_jit(lambda *x: critics.online_ensemble(*x))(*inputs())
    np.testing.assert_allclose(quick_jit(fewer)(*inputs()), every[..., members], rtol=1e-5, atol=1e-6)


def test_soft_update_moves_the_target_by_tau():
    critics = build()
    updated = critics.soft_update_target_networks(0.25)
    for new, target, online in zip(
        *map(jax.tree.leaves, (updated.target, critics.target, critics.online)), strict=True
    ):
        np.testing.assert_allclose(new, 0.75 * target + 0.25 * online, rtol=1e-6)
    assert updated.online is critics.online


def test_target_starts_equal_but_is_not_shared():
    critics = create_critic_networks(
        MLPCritics(num_critics=2, hidden_dims=(8,)), jax.random.key(0), feature_dim=0, state_dim=2, chunk_dim=2
    )
    for online, target in zip(jax.tree.leaves(critics.online), jax.tree.leaves(critics.target), strict=True):
        np.testing.assert_array_equal(online, target)
        assert online.unsafe_buffer_pointer() != target.unsafe_buffer_pointer()


def test_members_start_different_with_variance_scaling():
    critics = create_critic_networks(
        MLPCritics(num_critics=2, hidden_dims=(256, 256), kernel_init_scale=2.0, pooling="mean"),
        jax.random.key(0),
        feature_dim=100,
        state_dim=30,
        chunk_dim=70,
    )
    params = nnx.to_pure_dict(critics.online)
    both = np.concatenate([params["observation_kernel"], params["chunk_kernel"]], axis=1)
    assert both.shape == (2, 200, 256)
    assert both.std() == pytest.approx(math.sqrt(2.0 / ((200 + 256) / 2)), rel=0.02)
    assert not np.allclose(both[0], both[1])


def test_dropout_keeps_the_mean_and_is_off_without_keys():
    critics = build(dropout_rate=0.5, use_layer_norm=False, activation="relu", hidden_dims=(64,))
    features, observation, chunks = inputs(b=1, n=1)
    ensemble = critics.online_ensemble
    keys = jax.random.split(jax.random.key(0), 4000)
    still, dropped = quick_jit(lambda *x: (ensemble(*x), jax.vmap(lambda key: ensemble(*x, key[None]))(keys)))(
        features, observation, chunks
    )
    assert float(jnp.std(dropped)) > 0.1
    # One hidden layer is linear in its dropout, so the mean over masks is the network without it.
    error = np.abs(np.mean(dropped, axis=0) - still) / (np.std(dropped, axis=0) / math.sqrt(len(keys)))
    assert error.max() < 4


def test_dropout_of_a_sample_does_not_depend_on_its_neighbours():
    ensemble = build(dropout_rate=0.3).online_ensemble
    features, observation, chunks = inputs(b=6)
    keys = jax.random.split(jax.random.key(0), 6)
    together, alone = quick_jit(
        lambda *x: (ensemble(*x), ensemble(*jax.tree.map(lambda part: part[3:4], x)))  # all samples, and one of them
    )(features, observation, chunks, keys)
    np.testing.assert_allclose(together[3:4], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dims": ()}, "hidden_dims"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"target_subset_size": 4}, "target_subset_size"),
    ],
)
def test_impossible_critics_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        create_agent(make_config(critic=changes), jax.random.key(0))


def test_chunks_in_bfloat16_get_nearly_the_same_values():
    """Candidates are ranked in the policy's precision; parameters and values stay float32."""
    critics = build(hidden_dims=(64, 64), pooling="mean")
    features, observation, chunks = inputs(b=16, n=8)
    exact = critics.online_ensemble(features, observation, chunks)
    rough = critics.online_ensemble(features, observation, chunks.astype(jnp.bfloat16))
    assert rough.dtype == jnp.float32
    error = float(jnp.sqrt(jnp.mean(jnp.square(rough - exact))))
    spread = float(jnp.mean(jnp.std(exact, axis=1)))
    assert 0 < error < 0.03 * spread


@pytest.mark.parametrize("n, exact", [(2, True), (8, False)])
def test_ranks_are_rough_only_where_there_are_more_candidates_than_a_cast_is_worth(n, exact):
    ensemble = build(hidden_dims=(64, 64), pooling="mean").online_ensemble
    features, observation, chunks = inputs(b=16, n=n)
    values = np.asarray(ensemble.aggregate(ensemble(features, observation, chunks)))
    ranks = np.asarray(ensemble.rank(features, observation, chunks, jnp.bfloat16))
    assert (ranks == values).all() == exact
    np.testing.assert_allclose(ranks, values, atol=0.1 * values.std())
