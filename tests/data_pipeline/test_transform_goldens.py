"""Every transform against what openpi itself computed."""

import numpy as np
import pytest

from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.tokenizer import discretize_state
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DeltaActions,
    Normalize,
    PadStatesAndActions,
    Unnormalize,
    make_bool_mask,
)
from acrlpd.robots import (
    aloha as aloha_transforms,
)
from acrlpd.robots import (
    droid as droid_transforms,
)
from acrlpd.robots import (
    libero as libero_transforms,
)
from acrlpd.robots.naming import RobotOutputs

MASK = make_bool_mask(6, -1, 6, -1)


@pytest.fixture(scope="module")
def golden(goldens):
    return np.load(goldens / "transforms.npz")


@pytest.fixture(scope="module")
def norm_stats(golden):
    return {
        key: NormStats(**{field: golden[f"norm_stats/{key}/{field}"] for field in ("mean", "std", "q01", "q99")})
        for key in ("state", "actions")
    }


def inputs(golden, name, *, separator=None):
    """The nested dict below `name/`; keys that contain "/" themselves are left flat."""
    flat = {key.removeprefix(f"{name}/"): golden[key] for key in golden if key.startswith(f"{name}/")}
    if separator is None:
        return flat
    nested = {}
    for key, value in flat.items():
        *parents, leaf = key.split(separator)
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return nested


def assert_close(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(found[key], value)
        elif value.dtype == np.uint8 or value.dtype == bool:
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        else:
            rtol = 1e-12 if found[key].dtype == value.dtype == np.float64 else 2e-7
            np.testing.assert_allclose(found[key], value, rtol=rtol, atol=rtol, err_msg=key)


@pytest.mark.parametrize("dim", [14, 10])
@pytest.mark.parametrize("kind", ["zscore", "quantile"])
def test_normalize(golden, norm_stats, kind, dim):
    name = f"normalize_{kind}_dim{dim}"
    transform = Normalize(norm_stats, use_quantiles=kind == "quantile")
    assert_close(transform(inputs(golden, f"{name}/in")), inputs(golden, f"{name}/out"))


@pytest.mark.parametrize("dim", [14, 32])
@pytest.mark.parametrize("kind", ["zscore", "quantile"])
def test_unnormalize(golden, norm_stats, kind, dim):
    name = f"unnormalize_{kind}_dim{dim}"
    transform = Unnormalize(norm_stats, use_quantiles=kind == "quantile")
    assert_close(transform(inputs(golden, f"{name}/in")), inputs(golden, f"{name}/out"))


@pytest.mark.parametrize("dim", [14, 32])
@pytest.mark.parametrize(("name", "transform"), [("delta", DeltaActions(MASK)), ("absolute", AbsoluteActions(MASK))])
def test_relative_actions(golden, name, transform, dim):
    assert golden["aloha_delta_mask"].tolist() == list(MASK)
    assert_close(transform(inputs(golden, f"{name}_dim{dim}/in")), inputs(golden, f"{name}_dim{dim}/out"))


def test_pad(golden):
    assert_close(PadStatesAndActions(32)(inputs(golden, "pad32/in")), inputs(golden, "pad32/out"))


@pytest.mark.parametrize("adapt", [True, False])
def test_aloha_inputs(golden, adapt):
    name = f"aloha_inputs_adapt{adapt}"
    data = inputs(golden, f"{name}/in", separator="/")
    transform = aloha_transforms.AlohaInputs(adapt_to_pi=adapt)
    assert_close(transform(data), inputs(golden, f"{name}/out", separator="/"))
    data |= {key: data[key].astype(np.float32) for key in ("state", "actions")}
    from_float32 = {key: transform(data)[key] for key in ("state", "actions")}
    assert_close(from_float32, inputs(golden, f"{name}/out_from_float32"))


@pytest.mark.parametrize("adapt", [True, False])
def test_aloha_outputs(golden, adapt):
    name = f"aloha_outputs_adapt{adapt}"
    transform = aloha_transforms.AlohaOutputs(adapt_to_pi=adapt)
    assert_close(transform(inputs(golden, f"{name}/in")), inputs(golden, f"{name}/out"))


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_droid_inputs(golden, model):
    found = droid_transforms.DroidInputs()(inputs(golden, "droid_inputs/in"))
    assert_close(found, inputs(golden, f"droid_inputs_{model}/out", separator="/"))


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_libero_inputs(golden, model):
    found = libero_transforms.LiberoInputs()(inputs(golden, "libero_inputs/in"))
    assert_close(found, inputs(golden, f"libero_inputs_{model}/out", separator="/"))


@pytest.mark.parametrize(
    ("name", "action_dim"), [("droid", droid_transforms.ACTION_DIM), ("libero", libero_transforms.ACTION_DIM)]
)
def test_outputs_are_cut_to_the_robot(golden, name, action_dim):
    assert_close(RobotOutputs(action_dim)(inputs(golden, f"{name}_outputs/in")), inputs(golden, f"{name}_outputs/out"))


def test_discretize_state(golden):
    np.testing.assert_array_equal(discretize_state(golden["discretise_state/in"]), golden["discretise_state/out"])
