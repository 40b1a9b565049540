"""What goes wrong with environments, in words that name the fix."""

import importlib
from types import ModuleType


class EnvError(ValueError):
    """An environment cannot be made, or did something it must not; the message says what and where."""


def require(package: str, *, env: str, extra: str = "sim") -> ModuleType:
    """Imports a simulator's package, or says which extra brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # the package is there; something else that it needs is not
        raise ModuleNotFoundError(
            f"environment {env!r} needs the package {package!r}: pip install 'acrlpd[{extra}]'", name=package
        ) from error
