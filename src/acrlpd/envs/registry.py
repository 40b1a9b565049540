"""Environments by name."""

import fnmatch
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from acrlpd.envs.env import Env
from acrlpd.envs.errors import EnvError, require

IMAGE_SIZE = (224, 224)  # height and width of observed images: the resolution of the released policies

# make(name, *, cameras, image_size, max_episode_steps) -> Env
MakeFn = Callable[..., Env]

_OGBENCH = "acrlpd.envs.ogbench_env:make_ogbench"
_ALOHA = "acrlpd.envs.aloha_env:make_aloha"
_REGISTERED: dict[str, MakeFn | str] = {
    "cube-*": _OGBENCH,
    "scene-*": _OGBENCH,
    "puzzle-*": _OGBENCH,
    "visual-cube-*": _OGBENCH,
    "visual-scene-*": _OGBENCH,
    "visual-puzzle-*": _OGBENCH,
    "gym_aloha/AlohaTransferCube-v0": _ALOHA,
    "gym_aloha/AlohaInsertion-v0": _ALOHA,
    "libero_*": "acrlpd.envs.libero_env:make_libero",
}


def register_env(name: str, make: MakeFn) -> None:
    """Makes an environment known under a name, or under a pattern such as "kitchen-*".

    `make(name, *, cameras, image_size, max_episode_steps)` returns an `Env`. Define it at the top level of
    a module: parallel environments live in processes of their own, which import it. Where nobody else
    imports the module that registers, the name "module:name" does.
    """
    _REGISTERED[name] = make


def make_env(
    name: str,
    *,
    cameras: Sequence[str] | None = None,
    image_size: tuple[int, int] = IMAGE_SIZE,
    max_episode_steps: int | None = None,
) -> Env:
    """An environment by registered name or gymnasium id.

    `cameras` are the camera columns to observe (None: all that it has), `max_episode_steps` cuts episodes
    sooner than the environment's own limit.
    """
    return bind_env(name, cameras=cameras, image_size=image_size, max_episode_steps=max_episode_steps)()


def bind_env(
    name: str,
    *,
    cameras: Sequence[str] | None,
    image_size: tuple[int, int],
    max_episode_steps: int | None,
) -> Callable[[], Env]:
    """`make_env` for later, or for another process; numbers that no environment can have are refused now."""
    if min(image_size) < 1:
        raise EnvError(f"image_size must be height and width in pixels, at least 1; found {list(image_size)}")
    if max_episode_steps is not None and max_episode_steps < 1:
        raise EnvError(f"max_episode_steps must be at least 1; found {max_episode_steps}")
    return functools.partial(
        find_env(name), name, cameras=cameras, image_size=image_size, max_episode_steps=max_episode_steps
    )


def find_env(name: str) -> MakeFn:
    """The function that makes the environment of this name; "module:name" imports the module first."""
    module, _, known_as = name.rpartition(":")
    if module:
        _import_module(name, module)
    make = _REGISTERED.get(known_as)
    if make is None:
        patterns = [pattern for pattern in _REGISTERED if fnmatch.fnmatchcase(known_as, pattern)]
        make = _REGISTERED[patterns[-1]] if patterns else make_gymnasium
    if isinstance(make, str):
        module, _, attribute = make.partition(":")
        make = getattr(importlib.import_module(module), attribute)
    assert callable(make)
    return make


def list_envs() -> list[str]:
    """Registered names and patterns."""
    return list(_REGISTERED)


def _import_module(name: str, module: str) -> None:
    if module.startswith("."):
        raise EnvError(f"environment {name!r}: give the module's whole name; found the relative {module!r}")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"environment {name!r}: cannot import {module!r} ({error}). Install it, or put the directory of its file "
            "on Python's path: PYTHONPATH=. acrlpd ..."
        ) from error


def make_gymnasium(
    name: str,
    *,
    cameras: Sequence[str] | None = None,
    image_size: tuple[int, int] = IMAGE_SIZE,
    max_episode_steps: int | None = None,
    **options: Any,
) -> Env:
    """Any gymnasium id; `options` go to `Env`. Images keep the size that the environment gives them."""
    gymnasium = require("gymnasium", env=name)
    module, _, env_id = name.rpartition(":")
    if module:
        _import_module(name, module)
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise EnvError(
            f"unknown environment {name!r} ({error}). Registered are {', '.join(_REGISTERED)}, and every "
            "gymnasium id; a module that registers more is imported with 'module:name'"
        ) from error
    create = spec.entry_point
    if isinstance(create, str):
        create = gymnasium.envs.registration.load_env_creator(create)
    films = "rgb_array" in getattr(create, "metadata", {}).get("render_modes", ())
    env = gymnasium.make(env_id, disable_env_checker=True, **({"render_mode": "rgb_array"} if films else {}))
    defaults: dict[str, Any] = {
        "prompt": env_id.rpartition("/")[2].partition("-v")[0],
        "fps": float(env.metadata.get("render_fps", 30)),
        "cameras": cameras,
        "max_episode_steps": max_episode_steps,
    }
    return Env(env, name=name, **(defaults | options))
