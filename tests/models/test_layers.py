"""Attention of many chunks over one context against a softmax written out, and where a fused kernel exists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acrlpd.models.layers import shared_context_attention, widest_fused_head


def test_chunks_attend_to_themselves_and_to_the_valid_context() -> None:
    b, n, t, heads, h, s = 3, 4, 6, 8, 16, 32
    shapes = {"q": (b, n, t, heads, h), "k": (b, n, t, h), "v": (b, n, t, h), "ck": (b, s, h), "cv": (b, s, h)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    length = np.array([1, 20, 32], np.int32)
    out = shared_context_attention(x["q"], x["k"], x["v"], (x["ck"], x["cv"], jnp.asarray(length)))
    exact = {name: np.asarray(value, np.float64) for name, value in x.items()}
    for i, j in np.ndindex(b, n):
        seen = np.concatenate([exact["ck"][i, : length[i]], exact["k"][i, j]])
        values = np.concatenate([exact["cv"][i, : length[i]], exact["v"][i, j]])
        weights = np.exp(exact["q"][i, j] @ seen.T)
        np.testing.assert_allclose(out[i, j], weights / weights.sum(-1, keepdims=True) @ values, atol=1e-5)


@pytest.mark.parametrize(
    ("gpu", "compute_capability", "widest"),
    [
        ("T4", "7.5", 0),
        ("A100", "8.0", 128),
        ("RTX-4090 and L40S", "8.9", 128),
        ("H100", "9.0", 256),
        ("B200", "10.0", 128),
        ("RTX-5090", "12.0", 128),
        ("MI300X", "gfx942", 0),
    ],
)
def test_gemmas_heads_are_fused_on_hopper_alone(gpu: str, compute_capability: str, widest: int) -> None:
    """Asked for more, JAX or cuDNN raise an error instead of computing it another way."""
    assert widest_fused_head(compute_capability) == widest, gpu
