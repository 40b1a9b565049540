"""Goldens made with openpi itself, and the tiny models they belong to."""

import functools
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.pi0 import Pi0

GOLDENS = Path(__file__).parents[1] / "goldens"


@functools.cache
def load_golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as data:
        return dict(data)


def tiny_config(**changes) -> Pi0Config:
    settings = {
        "dtype": "float32",
        "paligemma_variant": "dummy",
        "action_expert_variant": "dummy",
        "siglip_variant": "mu/14",
        "vocab_size": 512,
        "action_horizon": 10,
        "max_token_len": 16,
    }
    return Pi0Config(**(settings | changes))


def with_params(config: Pi0Config, params: dict[str, np.ndarray]) -> Pi0:
    """The model with '/'-named golden parameters, every one of which must have a place in it."""
    model = nnx.eval_shape(lambda: config.create(jax.random.key(0)))
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    assert {"/".join(path) for path, _ in flat} == set(params)
    for path, leaf in flat:
        value = params["/".join(path)]
        assert leaf.shape == value.shape, path
        leaf.set_value(jax.numpy.asarray(value))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))
