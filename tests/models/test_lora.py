"""Adapters add exactly what openpi's LoRA adds, quirks included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_goldens import load_golden

from acrlpd.models import lora
from acrlpd.models.paligemma_sizes import LoRAConfig

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}
EQUATIONS = {"q": "btd,ndh->btnh", "kv": "bsd,ckdh->cbskh", "out": "btnh,nhd->btd"}


def weights(case: str) -> dict[str, np.ndarray]:
    golden = load_golden("lora_units")
    return {name.removeprefix(f"{case}/"): value for name, value in golden.items() if name.startswith(f"{case}/")}


@pytest.mark.parametrize("kind", EQUATIONS)
@pytest.mark.parametrize("scale", ["std", "rs"])
def test_einsum(kind, scale):
    case = weights(f"einsum_{kind}_{scale}")
    config = LoRAConfig(4, 8.0, rslora=scale == "rs")
    y = jnp.einsum(EQUATIONS[kind], case["x"], case["w"])
    y += lora.einsum_update(EQUATIONS[kind], jnp.asarray(case["x"]), case, config)
    np.testing.assert_allclose(y, case["y"], **TOLERANCE)


@pytest.mark.parametrize("scale", ["std", "rs"])
def test_feed_forward_is_not_scaled(scale):
    case, x = weights(f"ffn_{scale}"), jnp.asarray(load_golden("lora_units")["x"])
    gate, up = x @ case["gating_einsum"][0], x @ case["gating_einsum"][1]
    gate_update, up_update = lora.gating_update(x, case)
    hidden = jax.nn.gelu(gate + gate_update) * (up + up_update)
    y = hidden @ case["linear"] + lora.linear_update(hidden, case)
    np.testing.assert_allclose(y, case["y"], **TOLERANCE)
