"""Reinforcement-learning fine-tuning of pi0-family robot policies on action chunks.

The names of `__all__` are the public surface: they stay, with their arguments, between minor versions. The names are
imported when they are first used, so `import acrlpd` is instant and a process of an environment never imports JAX.
"""

# ruff: noqa: F403, F405
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Type checkers see the names of `__all__` through this import.
    from acrlpd.library import *

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "act",
    "create_agent",
    "create_policy",
    "evaluate",
    "export_policy",
    "get_config",
    "list_configs",
    "load_agent",
    "load_policy",
    "open_dataset",
    "save_agent",
    "serve",
    "train",
    "update_agent",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'acrlpd' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from acrlpd import library

    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
