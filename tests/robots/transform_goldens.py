"""What openpi's transforms computed, and how to compare with it."""

from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens"


def transform_goldens():
    return np.load(GOLDENS / "transforms.npz")


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
