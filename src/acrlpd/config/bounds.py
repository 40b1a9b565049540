"""Bounds stand with the field they bound, as `Annotated[int, Ge(1)]`; here they are checked, for every field alike."""

import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from acrlpd.config.tree import is_section
from acrlpd.findings import Finding, error


def check_bounds(config: Any, prefix: str = "") -> Iterator[Finding]:
    """Every field of a config, and of its sections, that lies outside of its bounds."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name, annotation in hints.items():
        if typing.get_origin(annotation) is typing.ClassVar or not hasattr(config, name):
            continue
        value = getattr(config, name)
        plain, *bounds = typing.get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
        if is_section(plain):
            yield from check_bounds(value, f"{prefix}{name}.")
        elif value is not None:
            yield from _outside(f"{prefix}{name}", value, bounds)


def _outside(name: str, value: Any, bounds: list[Any]) -> Iterator[Finding]:
    """Bounds of a list are those of its elements, but for its length."""
    for bound in bounds:
        if isinstance(bound, MinLen):
            if len(value) < bound.min_length:
                yield error(f"{name} must have at least {bound.min_length} elements; found {list(value)}")
            continue
        values = value if isinstance(value, tuple) else (value,)
        if any(not _holds(bound, element) for element in values):
            shown = list(value) if isinstance(value, tuple) else value
            yield error(f"{name} must {_describe(bound)}; found {shown}")


def _holds(bound: Any, value: Any) -> bool:
    return all(
        (not isinstance(part, Ge) or value >= part.ge)
        and (not isinstance(part, Gt) or value > part.gt)
        and (not isinstance(part, Le) or value <= part.le)
        and (not isinstance(part, Lt) or value < part.lt)
        for part in (bound if isinstance(bound, Interval) else (bound,))
    )


def _describe(bound: Any) -> str:
    if isinstance(bound, Interval):
        low, high = (bound.gt if bound.ge is None else bound.ge), (bound.lt if bound.le is None else bound.le)
        return f"lie in {'(' if bound.ge is None else '['}{low}, {high}{')' if bound.le is None else ']'}"
    for kind, words in ((Ge, "be at least"), (Gt, "be above"), (Le, "be at most"), (Lt, "be below")):
        if isinstance(bound, kind):
            return f"{words} {getattr(bound, kind.__name__.lower())}"
    raise TypeError(f"unknown bound {bound!r}")
