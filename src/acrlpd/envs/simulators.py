"""What simulators need of the machine: their packages, and MuJoCo's off-screen rendering."""

import ctypes.util
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from acrlpd.envs.env import EnvError
from acrlpd.installation import install_command, packages_left_out

SYSTEM_PACKAGES = "libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri"


def require(package: str, *, env: str) -> ModuleType:
    """Imports a simulator's package, or says which extra of acrlpd brings the package."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # the package is installed, but something that the package imports is missing
        fix = install_command("sim")
        if left_out := packages_left_out("sim"):  # on Python 3.13 they ask for a package that has no wheel there
            fix += f" && pip install --no-deps {' '.join(left_out)}"
        raise ModuleNotFoundError(f"environment {env!r} needs the package {package!r}: {fix}", name=package) from error


def choose_backend() -> None:
    """Sets MUJOCO_GL, which mujoco and dm_control read when they are imported, unless the user has set it.

    The backend is EGL where the library is installed: osmesa corrupts one renderer when another one is closed. Without
    EGL rendering is disabled, since environments without cameras need no graphics.
    """
    if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
        os.environ["MUJOCO_GL"] = "egl" if ctypes.util.find_library("EGL") else "disabled"


def require_rendering(env: str) -> None:
    """Refuses an environment with cameras on a machine that cannot render."""
    if os.environ.get("MUJOCO_GL") == "disabled":
        raise rendering_error(env, "MUJOCO_GL is 'disabled', or libEGL was not found")


def rendering_error(env: str, reason: str | Exception) -> EnvError:
    """The error that says what rendering needs and what works without rendering."""
    if isinstance(reason, Exception):
        reason = f"{type(reason).__name__}: {reason}"
    return EnvError(
        f"environment {env!r} cannot render: {reason}. Images and videos need EGL: on Debian and Ubuntu "
        f"`apt-get install {SYSTEM_PACKAGES}`, and MUJOCO_GL=egl (or unset) when the process starts. "
        "State-only environments, such as cube-single-play-singletask-v0 without videos, work without EGL"
    )


def use_fast_settings(model: Any) -> None:
    """Turns multisampling and shadows off: rendering in software is 3 to 8 times faster.

    Call this before the renderer is made. The settings change the pixels, so everything that renders (demonstrations,
    rollouts, evaluation) uses them.
    """
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
