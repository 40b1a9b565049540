"""MuJoCo's off-screen rendering: which backend, how fast, and what to do when it is missing."""

import ctypes.util
import os
import sys
from typing import Any

from acrlpd.envs.errors import EnvError

SYSTEM_PACKAGES = "libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri"


def choose_backend() -> None:
    """Sets MUJOCO_GL, which mujoco and dm_control read once, when they are imported.

    EGL where the library is there (osmesa corrupts one renderer when another is closed), otherwise none:
    state-only environments need no graphics at all. A value set by the user stays.
    """
    if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
        os.environ["MUJOCO_GL"] = "egl" if ctypes.util.find_library("EGL") else "disabled"


def require_rendering(env: str) -> None:
    """Refuses an environment with cameras on a machine that cannot render."""
    if os.environ.get("MUJOCO_GL") == "disabled":
        raise rendering_error(env, "MUJOCO_GL is 'disabled', or libEGL was not found")


def rendering_error(env: str, reason: str) -> EnvError:
    """The error that says what is missing and what works without it."""
    return EnvError(
        f"environment {env!r} cannot render: {reason}. Images and videos need EGL: on Debian and Ubuntu "
        f"`apt-get install {SYSTEM_PACKAGES}`, and MUJOCO_GL=egl (or unset) when the process starts. "
        "State-only environments, such as cube-single-play-singletask-v0 without videos, work without it"
    )


def use_fast_settings(model: Any) -> None:
    """No multisampling and no shadows: 3 to 8 times faster in software.

    Must come before the renderer exists. It changes the pixels, so everything that renders (demonstrations,
    rollouts, evaluation) goes through here.
    """
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
