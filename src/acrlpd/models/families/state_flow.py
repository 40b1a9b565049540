"""The small policy: an MLP vector field over state and action chunk, for low-dimensional tasks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.models.policy import Context
from acrlpd.models.state_policy import StatePolicy, StatePolicyConfig


@dataclasses.dataclass(frozen=True)
class StateFlowPolicyConfig(StatePolicyConfig):
    """An MLP vector field over state and action chunk, for low-dimensional benchmarks."""

    def create(self, rng: jax.Array) -> "StateFlowPolicy":
        """A freshly initialised policy."""
        return StateFlowPolicy(self, rngs=nnx.Rngs(rng))


class StateFlowPolicy(StatePolicy):
    """Flow matching on flattened chunks, conditioned on the state.

    The first layer has one kernel each for state, noisy chunk and flow time, and multiplies with all three at once.
    The state's share could be computed once for all candidates, but adding it to every candidate and step costs more
    than the wider product.
    """

    config: StateFlowPolicyConfig
    sampling_unroll = 10  # a step takes microseconds; one iteration of a loop takes as long

    def __init__(self, config: StateFlowPolicyConfig, rngs: nnx.Rngs):
        super().__init__(config)
        dtype = jnp.dtype(config.dtype)
        chunk_dim = config.action_horizon * config.action_dim
        width = config.hidden_dims[0]
        # Initial values as in the Q-chunking paper's code; those of the first layer are of one layer over all inputs.
        uniform = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        bound = (6 / (config.state_dim + chunk_dim + 1 + width)) ** 0.5
        init = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        self.state_in = nnx.Linear(config.state_dim, width, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)
        self.time_in = nnx.Linear(1, width, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)
        self.chunk_in = nnx.Linear(chunk_dim, width, kernel_init=init, dtype=dtype, rngs=rngs)
        self.hidden = nnx.List(
            nnx.Linear(dim_in, dim_out, kernel_init=uniform, dtype=dtype, rngs=rngs)
            for dim_in, dim_out in zip(config.hidden_dims[:-1], config.hidden_dims[1:], strict=True)
        )
        self.chunk_out = nnx.Linear(config.hidden_dims[-1], chunk_dim, kernel_init=uniform, dtype=dtype, rngs=rngs)

    def velocity(self, context: Context, x_t: jax.Array, time: jax.Array) -> jax.Array:
        self.refuse_other_chunks(x_t)
        b, n, horizon, dim = x_t.shape
        state = jnp.broadcast_to(context.memory[:, None], (b, n, self.config.state_dim))
        chunk, time = (x.astype(state.dtype) for x in (x_t.reshape(b, n, horizon * dim), time[..., None]))
        inputs = jnp.concatenate([state, chunk, time], axis=-1).reshape(b * n, -1)
        kernel = jnp.concatenate([layer.kernel[...] for layer in (self.state_in, self.chunk_in, self.time_in)])
        bias = self.chunk_in.bias
        assert bias is not None
        x = nnx.gelu(inputs @ kernel.astype(state.dtype) + bias[...].astype(state.dtype))
        for layer in self.hidden:
            x = nnx.gelu(layer(x))
        return self.chunk_out(x).astype(jnp.float32).reshape(x_t.shape)
