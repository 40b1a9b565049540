"""Environments by name."""

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from acrlpd.choice import hint, import_module, import_name
from acrlpd.envs.env import Env, EnvError
from acrlpd.envs.simulators import require

IMAGE_SIZE = (224, 224)  # height and width of observed images: the resolution of the released policies

# make(name, *, cameras, image_size, max_episode_steps) -> Env
MakeFn = Callable[..., Env]

OGBENCH_NAMES = ("cube-*", "scene-*", "puzzle-*", "visual-cube-*", "visual-scene-*", "visual-puzzle-*")
# Name or pattern -> the function that makes the environment; as text where its module is imported only when needed.
_REGISTERED: dict[str, MakeFn | str] = {
    **dict.fromkeys(OGBENCH_NAMES, "acrlpd.envs.ogbench_env:make_ogbench"),
    "gym_aloha/AlohaTransferCube-v0": "acrlpd.envs.aloha_env:make_aloha",
    "gym_aloha/AlohaInsertion-v0": "acrlpd.envs.aloha_env:make_aloha",
    "libero_*": "acrlpd.envs.libero_env:make_libero",
    "corridor": "acrlpd.envs.corridor:make_corridor",
}


def register_env(name: str, make: MakeFn) -> None:
    """Makes an environment known under a name, or under a pattern such as "kitchen-*".

    `make(name, *, cameras, image_size, max_episode_steps)` returns an `Env`. Define `make` at the top level of a
    module, because the processes of parallel environments import it. The environment's name "module:name" imports the
    module that registers it.
    """
    _REGISTERED[name] = make


class EnvOptions(TypedDict, total=False):
    """What is asked of an environment when it is made."""

    cameras: Sequence[str] | None  # camera columns to observe; None means all that the environment has
    image_size: tuple[int, int]  # height and width of observed images
    max_episode_steps: int | None  # cuts episodes sooner than the environment's own limit


def make_env(name: str, **options: Unpack[EnvOptions]) -> Env:
    """An environment by its registered name or gymnasium id."""
    return bind_env(name, **options)()


def bind_env(name: str, **options: Unpack[EnvOptions]) -> Callable[[], Env]:
    """`make_env` for later or for another process; the name and the numbers are checked now."""
    options = {"cameras": None, "image_size": IMAGE_SIZE, "max_episode_steps": None, **options}
    if min(options["image_size"]) < 1:
        raise EnvError(
            f"image_size must be height and width in pixels, at least 1; found {list(options['image_size'])}"
        )
    limit = options["max_episode_steps"]
    if limit is not None and limit < 1:
        raise EnvError(f"max_episode_steps must be at least 1; found {limit}")
    make = find_by_pattern(_REGISTERED, import_registration(name)) or make_gymnasium
    if isinstance(make, str):
        make = import_name(make)
    return functools.partial(_make_named, make, name, options)


def _make_named(make: MakeFn, name: str, options: EnvOptions) -> Env:
    """Makes an environment under the name that the user typed, and puts that name into errors.

    A registered function may know its environment by another name, such as the gymnasium id behind it.
    """
    try:
        env = make(name, **options)
    except ImportError:
        raise  # these errors say what has to be installed
    except Exception as error:  # whatever the function of a user or a simulator raises
        if isinstance(error, EnvError) and repr(name) in str(error):
            raise
        reason = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
        raise EnvError(f"environment {name!r} cannot be made: {reason}") from error
    if not isinstance(env, Env):
        raise EnvError(
            f"environment {name!r}: the function given to register_env must return an acrlpd.envs.Env; found "
            f"{type(env).__name__}. Env(my_environment, name=name, prompt=..., fps=...) makes one"
        )
    env.rename(name)
    return env


def import_registration(name: str) -> str:
    """Imports the module of "module:name", which registers the environment, and returns the name alone."""
    if ":" in name:
        try:
            import_module(name)
        except EnvError:
            raise  # the module registers something wrong, and the error says what
        except ValueError as error:
            raise EnvError(f"environment {error}") from error
    return name.partition(":")[2] or name


def is_registered(name: str) -> bool:
    """Whether an environment is registered under this name; other gymnasium ids can be made, too."""
    return find_by_pattern(_REGISTERED, import_registration(name)) is not None


def find_by_pattern(registered: dict[str, Any], name: str) -> Any:
    """What is registered under this name, or else under the newest pattern that fits; None where nothing fits."""
    patterns = [pattern for pattern in registered if fnmatch.fnmatchcase(name, pattern)]
    return registered.get(name, registered[patterns[-1]] if patterns else None)


def typed_names(registered: Mapping[str, Any]) -> list[str]:
    """Registered names as users type them: what a module of theirs has registered is module:name."""
    return [name if isinstance(member, str) else f"{member.__module__}:{name}" for name, member in registered.items()]


def make_gymnasium(name: str, *, image_size: tuple[int, int] = IMAGE_SIZE, **options: Any) -> Env:
    """Any gymnasium id; `options` go to `Env`. Images keep the size that the environment gives them."""
    gymnasium = require("gymnasium", env=name)
    env_id = import_registration(name)
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        known = typed_names(_REGISTERED)
        raise EnvError(
            f"unknown environment {name!r} ({error}). Registered are {', '.join(known)}, and every gymnasium id; a "
            f"module that registers more is imported with 'module:name'{hint(name, known)}"
        ) from error
    create = spec.entry_point
    if isinstance(create, str):
        create = gymnasium.envs.registration.load_env_creator(create)
    films = "rgb_array" in getattr(create, "metadata", {}).get("render_modes", ())
    env = gymnasium.make(env_id, disable_env_checker=True, **({"render_mode": "rgb_array"} if films else {}))
    options.setdefault("prompt", env_id.rpartition("/")[2].partition("-v")[0])
    options.setdefault("fps", float(env.metadata.get("render_fps", 30)))
    return Env(env, name=name, **options)
