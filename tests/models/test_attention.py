"""Attention of many chunks over one context against a softmax written out; on a GPU, the fused kernel too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acrlpd.models import attention

SIZES = {"b": 3, "n": 4, "t": 6, "heads": 8, "h": 64, "s": 128}
LENGTH = np.array([1, 70, 128], np.int32)


def operands(dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    b, n, t, heads, h, s = SIZES.values()
    shapes = ((b, n, t, heads, h), (b, n, t, h), (b, n, t, h), (b, s, h), (b, s, h))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple((0.5 * jax.random.normal(key, shape)).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A number that depends on every output differently, and the outputs."""
    q, k, v, context_k, context_v = inputs
    out = attention.shared_context_attention(q, k, v, (context_k, context_v, jnp.asarray(LENGTH))).astype(jnp.float32)
    return jnp.sum(jnp.sin(out * jnp.arange(1, out.shape[-1] + 1))), out


def test_chunks_attend_to_themselves_and_to_the_valid_context() -> None:
    q, k, v, context_k, context_v = (np.asarray(x, np.float64) for x in operands(jnp.float32))
    out = np.asarray(loss(*operands(jnp.float32))[1])
    for b, n in np.ndindex(out.shape[:2]):
        keys = np.concatenate([context_k[b, : LENGTH[b]], k[b, n]])
        values = np.concatenate([context_v[b, : LENGTH[b]], v[b, n]])
        weights = np.exp(q[b, n] @ keys.T)
        np.testing.assert_allclose(out[b, n], weights / weights.sum(-1, keepdims=True) @ values, atol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs a GPU")
def test_the_fused_kernel_has_the_values_and_gradients_of_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = operands(jnp.bfloat16)
    assert attention._has_fused_kernel(inputs[0])
    value_and_grad = jax.value_and_grad(loss, argnums=range(5), has_aux=True)
    (_, fused), fused_grads = value_and_grad(*inputs)
    monkeypatch.setattr(attention, "_has_fused_kernel", lambda q: False)
    (_, plain), plain_grads = value_and_grad(*inputs)
    np.testing.assert_allclose(fused, plain, atol=2e-2)
    for fused_grad, plain_grad in zip(fused_grads, plain_grads, strict=True):
        difference = jnp.linalg.norm((fused_grad - plain_grad).astype(jnp.float32))
        assert difference < 0.02 * jnp.linalg.norm(plain_grad.astype(jnp.float32))
