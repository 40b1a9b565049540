"""Sections of a config that are one of several classes: ours by a short name, a user's own by `module:Name`.

A family is a class that inherits directly from `Choice` and names the package of its members. Each module of that
package, except `base`, holds one member, and the name of the module is the short name of the member: a new member is a
new file. A member is a frozen dataclass that inherits from the family. Its fields are the options that a config may
set, and each field has a default. A config names the member under the key `type`, or alone where the defaults are
meant:

    improvement: best_of_n
    improvement: {type: my_losses:MyLoss, strength: 2.0}
"""

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar, TypeVar

Family = TypeVar("Family", bound="Choice")


class Choice:
    """Base of every family."""

    # The package whose modules are the members.
    package: ClassVar[str]


def is_family(annotation: Any) -> bool:
    """Whether a field of this type holds one of several classes."""
    return isinstance(annotation, type) and Choice in annotation.__bases__


def kind_names(family: type[Choice]) -> tuple[str, ...]:
    """Short names of our own members."""
    spec = importlib.util.find_spec(family.package)
    assert spec is not None and spec.submodule_search_locations is not None
    return tuple(sorted(i.name for i in pkgutil.iter_modules(spec.submodule_search_locations) if i.name != "base"))


def kind_name(member: "Choice | type[Choice]") -> str:
    """The name by which a config chooses this member."""
    cls = member if isinstance(member, type) else type(member)
    package, _, module = cls.__module__.rpartition(".")
    return module if package == cls.package else f"{cls.__module__}:{cls.__qualname__}"


def find_kind(family: type[Family], name: str) -> type[Family]:
    """The member of this name; a ValueError says what the name may be."""
    known = kind_names(family)
    if name in known:
        module = importlib.import_module(f"{family.package}.{name}")
        [member] = [c for c in vars(module).values() if _is_member(c, family) and c.__module__ == module.__name__]
        return member
    if ":" not in name:
        raise ValueError(
            f"must be one of {', '.join(known)}, or module:Name of your own; found {name!r}{hint(name, known)}"
        )
    found = import_name(name)
    if not _is_member(found, family):
        raise ValueError(f"{name} must be a class that inherits from {family.__module__}.{family.__name__}")
    if "__dataclass_params__" not in vars(found):
        raise ValueError(f"{name} must be a dataclass: write @dataclasses.dataclass(frozen=True) above the class")
    missing = dataclasses.MISSING
    required = [f.name for f in dataclasses.fields(found) if f.default is missing and f.default_factory is missing]
    if required:
        raise ValueError(f"{name} needs a default for each of its fields; {', '.join(required)} has no default")
    return found


def _is_member(value: Any, family: type[Choice]) -> bool:
    return isinstance(value, type) and issubclass(value, family) and value is not family


def import_name(path: str) -> Any:
    """The object that `module:Name` names; a ValueError says which part is missing."""
    module, attribute = import_module(path), path.partition(":")[2]
    if not hasattr(module, attribute):
        raise ValueError(f"{path}: the module {module.__name__!r} has no {attribute!r}")
    return getattr(module, attribute)


def import_module(path: str) -> ModuleType:
    """The module of `module:Name`; a ValueError says how Python finds a module that is missing."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ValueError(f"{path!r} is not of the form module:Name, with the module's whole name")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: cannot import {module_name!r} ({error}). Install the module, or put the directory of its file on "
            "Python's path: PYTHONPATH=. acrlpd ..."
        ) from error


def hint(word: str, known: Iterable[str]) -> str:
    """The nearest known name as the end of a sentence, or nothing."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {match[0]!r}?" if match else ""
