"""The Gaussian policy: its probabilities against a numeric change of variables, and the interface of all policies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

CONFIG = GaussianPolicyConfig(state_dim=4, action_dim=2, action_horizon=3, hidden_dims=(16, 8))


@pytest.fixture(scope="module")
def policy():
    return CONFIG.create(jax.random.key(0))


@pytest.fixture(scope="module")
def context(policy):
    return policy.encode(CONFIG.fake_obs(2))


def test_log_probabilities_are_the_numeric_change_of_variables(policy, context):
    """log pi(c) = log N(noise) - log |det dc / dnoise|, over the whole chunk."""
    noise = jax.random.normal(jax.random.key(1), (2, 5, 3, 2))

    @quick_jit
    def compute(noise):
        def chunk(flat):
            rows = jnp.broadcast_to(flat.reshape(1, 1, 3, 2), (2, 1, 3, 2))
            return policy.denoise(context, rows)[0].reshape(-1)

        jacobians = jax.vmap(jax.jacobian(chunk))(noise[0].reshape(5, 6))
        return policy.sample_with_log_prob(context, noise), policy.denoise(context, noise), jacobians

    (chunks, log_prob), denoised, jacobians = compute(noise)
    np.testing.assert_allclose(chunks, denoised, atol=1e-6)
    normal = np.sum(-0.5 * np.square(noise[0]) - 0.5 * np.log(2 * np.pi), axis=(1, 2))
    np.testing.assert_allclose(log_prob[0], normal - np.linalg.slogdet(jacobians)[1], rtol=1e-4, atol=1e-4)


def test_the_cloning_loss_is_minus_the_log_probability_of_a_chunk(policy, context):
    noise = 0.3 * jax.random.normal(jax.random.key(2), (2, 1, 3, 2))
    chunks, log_prob = policy.sample_with_log_prob(context, noise)
    loss = policy.flow_matching_loss(context, chunks[:, 0], noise[:, 0], jnp.zeros(2))
    assert loss.shape == (2, 3)
    np.testing.assert_allclose(jnp.mean(loss, axis=1), -log_prob[:, 0], rtol=1e-4, atol=1e-4)


def test_densities_integrate_to_one():
    config = GaussianPolicyConfig(state_dim=1, action_dim=1, action_horizon=1, hidden_dims=(8,))
    policy = config.create(jax.random.key(3))
    actions = jnp.linspace(-1 + 2e-5, 1 - 2e-5, 20_001)
    context = jax.tree.map(lambda x: jnp.repeat(x, len(actions), axis=0), policy.encode(config.fake_obs(1)))
    loss = policy.flow_matching_loss(context, actions[:, None, None], actions[:, None, None], actions)
    assert float(jnp.trapezoid(jnp.exp(-loss[:, 0]), actions)) == pytest.approx(1.0, abs=1e-3)


def test_losses_are_finite_at_the_bounds_and_far_beyond_them(policy, context):
    """Logged actions of exactly 1, and samples whose tanh is 1 in float32."""
    graphdef, params = nnx.split(policy)

    @quick_jit
    def compute(params):
        def total(params):
            policy = nnx.merge(graphdef, params)
            cloned = policy.flow_matching_loss(context, jnp.ones((2, 3, 2)), jnp.zeros((2, 3, 2)), jnp.zeros(2))
            _, log_prob = policy.sample_with_log_prob(context, jnp.full((2, 1, 3, 2), 60.0))
            return jnp.sum(cloned) + 1e-3 * jnp.sum(log_prob)

        return jax.value_and_grad(total)(params)

    loss, grads = compute(params)
    assert np.isfinite(loss) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_has_the_interface_of_all_policies(policy, context):
    observation, key = CONFIG.fake_obs(3), jax.random.key(0)
    candidates = policy.sample_candidates(key, observation, 4)
    assert candidates.shape == (3, 4, 3, 2) and float(jnp.max(jnp.abs(candidates))) < 1
    assert policy.compute_loss(key, observation, CONFIG.fake_act(3)).shape == (3, 3)
    noise = jax.random.normal(key, (2, 4, 3, 2))
    step = noise - policy.velocity(context, noise, jnp.ones((2, 4)))
    np.testing.assert_allclose(step, policy.denoise(context, noise), atol=1e-6)
    with pytest.raises(ValueError, match=r"state must be \[b, 4\]; found \(1, 28\)"):
        policy.encode(StateFlowPolicyConfig().fake_obs(1))
    with pytest.raises(ValueError, match=r"\[3, 2\]; found shape \(2, 4, 2, 2\)"):
        policy.denoise(context, noise[:, :, :2])
