"""Presets by name. A preset is a file in `acrlpd.config.presets`; its docstring says what it is for."""

import functools
import importlib
import pkgutil
import types

from acrlpd.choice import hint
from acrlpd.config import presets
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.config.tree import ConfigError


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(presets.__path__))
    return {name: importlib.import_module(f"{presets.__name__}.{name}") for name in names}


@functools.cache
def _aliases() -> dict[str, str]:
    return {alias: name for name, module in _modules().items() for alias in getattr(module, "ALIASES", ())}


def get_config(name: str) -> RLTrainConfig:
    """The preset of this name or alias."""
    modules = _modules()
    preset = _aliases().get(name, name)
    if preset not in modules:
        known = [*modules, *_aliases()]
        raise ConfigError(f"unknown config {name!r}{hint(name, known)}\nknown configs: {', '.join(known)}")
    return modules[preset].CONFIG


def list_configs() -> dict[str, str]:
    """Name -> one line about it, for every preset and alias."""
    lines = {name: _first_line(module) for name, module in _modules().items()}
    return lines | {alias: f"the same as {name}" for alias, name in _aliases().items()}


def describe_config(name: str) -> str:
    """The preset's whole docstring."""
    get_config(name)
    return (_modules()[_aliases().get(name, name)].__doc__ or "").strip()


def _first_line(module: types.ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]
