"""Skips with a reason where a simulator or EGL is missing."""

import ctypes.util
import importlib.util

import pytest

needs_ogbench = pytest.mark.skipif(
    importlib.util.find_spec("ogbench") is None, reason="ogbench is missing: pip install 'acrlpd[sim]'"
)
needs_aloha = pytest.mark.skipif(
    importlib.util.find_spec("gym_aloha") is None, reason="gym-aloha is missing: pip install 'acrlpd[sim]'"
)
needs_gymnasium = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None, reason="gymnasium is missing: pip install 'acrlpd[sim]'"
)
needs_egl = pytest.mark.skipif(
    ctypes.util.find_library("EGL") is None,
    reason="libEGL is missing: apt-get install libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri",
)
