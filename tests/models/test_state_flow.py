"""The state-space flow policy against a network written out, and as a flow that can be learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from acrlpd.config.bounds import check_bounds
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import FlowPolicy

# Compiling takes longer than running here, so XLA is asked to try less hard.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

CONFIG = StateFlowPolicyConfig(state_dim=4, action_dim=2, action_horizon=3, hidden_dims=(16, 8))


def observe(states) -> Observation:
    return Observation(images={}, image_masks={}, state=jnp.asarray(states, jnp.float32))


@pytest.fixture(scope="module")
def policy():
    return CONFIG.create(jax.random.key(0))


def test_is_one_network_over_state_chunk_and_time(policy):
    """The split first layer is the plain one on their concatenation."""
    rng = np.random.default_rng(0)
    state, x_t, time = rng.normal(size=(2, 4)), rng.normal(size=(2, 5, 3, 2)), rng.random((2, 5))
    p = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(policy)))
    kernel = np.concatenate([p["state_in"]["kernel"], p["chunk_in"]["kernel"], p["time_in"]["kernel"]])

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    velocity = policy.velocity(
        policy.encode(observe(state)), jnp.asarray(x_t, jnp.float32), jnp.asarray(time, jnp.float32)
    )
    for b, n in np.ndindex(2, 5):
        x = np.concatenate([state[b], x_t[b, n].reshape(-1), time[b, n : n + 1]])
        x = gelu(x @ kernel + p["chunk_in"]["bias"])
        x = gelu(x @ p["hidden"][0]["kernel"] + p["hidden"][0]["bias"])
        x = x @ p["chunk_out"]["kernel"] + p["chunk_out"]["bias"]
        np.testing.assert_allclose(velocity[b, n].reshape(-1), x, rtol=1e-4, atol=1e-5)
    assert kernel.shape == (4 + 6 + 1, 16)
    assert policy.encode(observe(state)).features is None and policy.feature_dim == 0


def test_is_a_flow_policy_with_the_common_interface(policy):
    assert isinstance(policy, FlowPolicy)
    observation, actions = CONFIG.fake_obs(3), CONFIG.fake_act(3)
    key, noise = jax.random.key(0), np.random.default_rng(0).normal(size=(3, 4, 3, 2)).astype(np.float32)
    loss = jax.eval_shape(lambda key: policy.compute_loss(key, observation, actions, train=True), key)
    assert loss.shape == (3, 3)
    assert jax.eval_shape(lambda key: policy.sample_actions(key, observation), key).shape == (3, 3, 2)
    candidates, alone = quick_jit(
        lambda noise: (
            policy.sample_candidates(key, observation, 4, noise=noise),
            policy.sample_actions(key, observation, noise=noise[:, 2]),
        )
    )(noise)
    assert candidates.shape == (3, 4, 3, 2)
    np.testing.assert_allclose(candidates[:, 2], alone, rtol=1e-5, atol=1e-6)


def test_rematerialised_sampling_is_the_same(policy):
    context = policy.encode(CONFIG.fake_obs(2))
    noise = jax.random.normal(jax.random.key(1), (2, 1, 3, 2))

    def value_and_grad(remat):
        loss = lambda x: jnp.sum(policy.denoise(context, x, num_steps=3, remat=remat) ** 2)  # noqa: E731
        return quick_jit(jax.value_and_grad(loss))(noise)

    for stored, recomputed in zip(value_and_grad(False), value_and_grad(True), strict=True):
        np.testing.assert_allclose(stored, recomputed, rtol=1e-5, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    config = StateFlowPolicyConfig(state_dim=4, action_dim=2, action_horizon=3, hidden_dims=(16, 8), dtype="bfloat16")
    policy, reference = config.create(jax.random.key(0)), CONFIG.create(jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(policy)))
    context = policy.encode(config.fake_obs(2))
    assert context.memory.dtype == jnp.bfloat16
    x_t, time = jax.random.normal(jax.random.key(1), (2, 4, 3, 2)), jnp.full((2, 4), 0.3)
    velocity = policy.velocity(context, x_t, time)
    assert velocity.dtype == jnp.float32
    expected = reference.velocity(reference.encode(CONFIG.fake_obs(2)), x_t, time)
    assert 0 < float(jnp.max(jnp.abs(velocity - expected))) < 0.05


def test_learns_a_conditional_distribution():
    """The sign of the state decides the action; sampling from noise recovers it."""
    config = StateFlowPolicyConfig(state_dim=1, action_dim=1, action_horizon=2, hidden_dims=(64, 64))
    graphdef, params = nnx.split(config.create(jax.random.key(0)))
    tx = optax.adam(3e-3)

    def step(carry, key):
        params, opt_state = carry
        state = jnp.sign(jax.random.normal(key, (128, 1)))
        actions = jnp.broadcast_to(0.5 * state[:, None], (128, 2, 1))
        grads = jax.grad(lambda p: nnx.merge(graphdef, p).compute_loss(key, observe(state), actions).mean())(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    keys = jax.random.split(jax.random.key(1), 600)
    params, _ = quick_jit(lambda carry: jax.lax.scan(step, carry, keys)[0])((params, tx.init(params)))
    states = np.asarray([[1.0], [-1.0]])
    samples = nnx.merge(graphdef, params).sample_candidates(jax.random.key(2), observe(states), 50)
    np.testing.assert_allclose(np.mean(samples, axis=(1, 2, 3)), [0.5, -0.5], atol=0.05)
    assert float(np.std(samples, axis=1).max()) < 0.15


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_dim": 0}, "state_dim must be at least 1; found 0"),
        ({"hidden_dims": ()}, "hidden_dims must have at least 1 elements"),
        ({"hidden_dims": (8, 0)}, "hidden_dims must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(fields, message):
    [(level, found)] = check_bounds(StateFlowPolicyConfig(**fields))
    assert level == "error"
    assert message in found


def test_wrong_shapes_are_named(policy):
    with pytest.raises(ValueError, match=r"state must be \[b, 4\]; found \(1, 5\)"):
        policy.encode(observe(np.zeros((1, 5))))
    context = policy.encode(CONFIG.fake_obs(1))
    with pytest.raises(ValueError, match=r"\[3, 2\]; found shape \(1, 1, 4, 2\)"):
        policy.velocity(context, jnp.zeros((1, 1, 4, 2)), jnp.zeros((1, 1)))
    with pytest.raises(ValueError, match="no backbone"):
        CONFIG.get_freeze_filter(freeze_pi0_backbone=True)
