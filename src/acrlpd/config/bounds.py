"""Checks the bounds of every field. A bound stands with the field that it bounds, as `Annotated[int, Ge(1)]`."""

import operator
import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from acrlpd.config.tree import field_types, is_section
from acrlpd.findings import Finding, error

_COMPARISONS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


def check_bounds(section: Any, prefix: str = "") -> Iterator[Finding]:
    """One error for every field, of the section and of the sections in it, that lies outside of its bounds."""
    cls: type = type(section)
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, annotation in field_types(cls).items():
        value = getattr(section, name)
        if is_section(annotation):
            yield from check_bounds(value, f"{prefix}{name}.")
        elif value is not None:
            yield from _check_value(f"{prefix}{name}", value, getattr(hints[name], "__metadata__", ()))


def _check_value(name: str, value: Any, metadata: tuple[Any, ...]) -> Iterator[Finding]:
    """A bound of a list is a bound of each element; only `MinLen` is about the list itself."""
    elements = value if isinstance(value, tuple) else (value,)
    shown = list(value) if isinstance(value, tuple) else value
    for bound in metadata:
        if isinstance(bound, MinLen) and len(value) < bound.min_length:
            yield error(f"{name} must have at least {bound.min_length} elements; found {shown}")
        limits = [part for part in (bound if isinstance(bound, Interval) else (bound,)) if type(part) in _COMPARISONS]
        if not all(_COMPARISONS[type(part)][0](element, _limit(part)) for part in limits for element in elements):
            yield error(f"{name} must {_describe(limits)}; found {shown}")


def _describe(limits: list[Any]) -> str:
    if len(limits) == 1:
        return f"be {_COMPARISONS[type(limits[0])][1]} {_limit(limits[0])}"
    low, high = sorted(limits, key=_limit)
    opening, closing = "[" if isinstance(low, Ge) else "(", "]" if isinstance(high, Le) else ")"
    return f"lie in {opening}{_limit(low)}, {_limit(high)}{closing}"


def _limit(bound: Any) -> Any:
    """The number in a bound: annotated_types calls the field of `Ge` `ge`, and so on."""
    return getattr(bound, type(bound).__name__.lower())
