"""Every transform against what openpi itself computed."""

import numpy as np
import pytest
from transform_goldens import assert_close, inputs, transform_goldens

from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.tokenizer import discretize_state
from acrlpd.data.pipeline.transforms import (
    AbsoluteActions,
    DeltaActions,
    Normalize,
    PadStatesAndActions,
    Unnormalize,
)
from acrlpd.robots.base import make_bool_mask

MASK = make_bool_mask(6, -1, 6, -1)


@pytest.fixture(scope="module")
def golden():
    return transform_goldens()


@pytest.fixture(scope="module")
def norm_stats(golden):
    return {
        key: NormStats(**{field: golden[f"norm_stats/{key}/{field}"] for field in ("mean", "std", "q01", "q99")})
        for key in ("state", "actions")
    }


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


def test_discretize_state(golden):
    np.testing.assert_array_equal(discretize_state(golden["discretise_state/in"]), golden["discretise_state/out"])
