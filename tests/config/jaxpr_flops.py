"""Counts the multiply-adds of a traced function: the brute-force reference for the plan's formulas."""

import math
from collections.abc import Callable
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """2 m k n of every matrix product, loops multiplied out."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contract)
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in params["branches"])
    inner = sum(_count(sub) for sub in _inner(params))
    return inner * params["length"] if name == "scan" else inner


def _inner(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(getattr(item, "jaxpr", None), "eqns"):
                found.append(item.jaxpr)
    return found
