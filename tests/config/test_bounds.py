"""Bounds that stand with their fields: each is checked, and no number of a run is without one."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from acrlpd.config import RLTrainConfig, run
from acrlpd.config.bounds import check_bounds
from acrlpd.config.tree import type_options


@dataclasses.dataclass(frozen=True)
class Inner:
    size: Annotated[int | None, Ge(1)] = None


@dataclasses.dataclass(frozen=True)
class Outer:
    steps: Annotated[int, Ge(0)] = 0
    rate: Annotated[float, Gt(0)] = 1.0
    share: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    most: Annotated[int, Le(9)] = 9
    less: Annotated[float, Lt(2.5)] = 2.0
    widths: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (1, 2)
    name: str = "x"
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_what_lies_inside_is_fine() -> None:
    assert not list(check_bounds(Outer()))
    assert not list(check_bounds(Outer(share=0.0, rate=1e-9, inner=Inner(1))))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Outer(steps=-1), "steps must be at least 0; found -1"),
        (Outer(rate=0.0), "rate must be above 0; found 0.0"),
        (Outer(share=1.0), "share must lie in [0, 1); found 1.0"),
        (Outer(share=-0.1), "share must lie in [0, 1); found -0.1"),
        (Outer(most=10), "most must be at most 9; found 10"),
        (Outer(less=2.5), "less must be below 2.5; found 2.5"),
        (Outer(widths=()), "widths must have at least 1 elements; found []"),
        (Outer(widths=(4, 0)), "widths must be at least 1; found [4, 0]"),
        (Outer(inner=Inner(0)), "inner.size must be at least 1; found 0"),
    ],
)
def test_what_lies_outside_is_an_error(changed: Outer, message: str) -> None:
    [(level, found)] = check_bounds(changed)
    assert (level, found) == ("error", message)


def _numbers(cls: type) -> Iterator[tuple[str, Any]]:
    """Name and complete annotation of every field of a section that holds a number or numbers."""
    for name, annotation in typing.get_type_hints(cls, include_extras=True).items():
        plain = typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
        elements = [typing.get_args(option)[0] if typing.get_args(option) else option for option in type_options(plain)]
        if any(element in (int, float) for element in elements):
            yield name, annotation


SECTIONS = [
    RLTrainConfig,
    *(cls for cls in vars(run).values() if isinstance(cls, type) and dataclasses.is_dataclass(cls)),
]
# A joint may have any angle.
UNBOUNDED = {"reset_pose"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_number_of_a_run_has_a_bound(section: type) -> None:
    without = {name for name, annotation in _numbers(section) if not hasattr(annotation, "__metadata__")}
    assert without <= UNBOUNDED
