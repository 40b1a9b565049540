"""The squashed Gaussian of SAC and of the small policies of improvements."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.models.squashed_gaussian import SquashedGaussian


def test_the_density_integrates_to_one_and_is_that_of_the_samples():
    gaussian = SquashedGaussian(2, (8,), 1, dtype="float32", rngs=nnx.Rngs(0))
    x = jnp.asarray([0.3, -0.7])
    samples, sampled_density = gaussian.sample(x, jax.random.normal(jax.random.key(0), (20_000, 1)))
    edges = np.linspace(-1, 1, 20_001)
    centers = (edges[1:] + edges[:-1]) / 2
    mass = np.exp(np.asarray(gaussian.log_density(x, jnp.asarray(centers[:, None])))[:, 0]) * np.diff(edges)
    np.testing.assert_allclose(mass.sum(), 1, atol=1e-3)
    share, _ = np.histogram(np.asarray(samples), bins=edges[::1_000])
    np.testing.assert_allclose(share / 20_000, mass.reshape(20, -1).sum(axis=1), atol=0.01)
    np.testing.assert_allclose(gaussian.log_density(x, samples), sampled_density, rtol=1e-2, atol=1e-2)
