"""Checks the bounds of every field. A bound stands with the field that it bounds, as `Annotated[int, Ge(1)]`."""

import operator
import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import MinLen

from acrlpd.config.tree import field_types, is_section
from acrlpd.findings import Finding, error

# By the names that the fields of `Ge`, `Gt`, `Le`, `Lt` and `Interval` have.
_COMPARISONS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
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


def require_bounds(section: Any, prefix: str = "", error_type: type[ValueError] = ValueError) -> None:
    """Raises an error if a field lies outside of its bounds."""
    for finding in check_bounds(section, prefix):
        raise error_type(finding.message)


def _check_value(name: str, value: Any, metadata: tuple[Any, ...]) -> Iterator[Finding]:
    """A bound of a list is a bound of each element; only `MinLen` is about the list itself."""
    elements = value if isinstance(value, tuple) else (value,)
    shown = list(value) if isinstance(value, tuple) else value
    for bound in metadata:
        if isinstance(bound, MinLen) and len(value) < bound.min_length:
            yield error(f"{name} must have at least {bound.min_length} elements; found {shown}")
        limits = {kind: limit for kind in _COMPARISONS if (limit := getattr(bound, kind, None)) is not None}
        if not all(_COMPARISONS[kind][0](element, limit) for kind, limit in limits.items() for element in elements):
            yield error(f"{name} must {_describe(limits)}; found {shown}")


def _describe(limits: dict[str, Any]) -> str:
    if len(limits) == 1:
        [(kind, limit)] = limits.items()
        return f"be {_COMPARISONS[kind][1]} {limit}"
    low, high = limits.values()
    return f"lie in {'[' if 'ge' in limits else '('}{low}, {high}{']' if 'le' in limits else ')'}"
