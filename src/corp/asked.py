"""Single values of a request, checked: what is wrong, and what it should be."""

from __future__ import annotations

import math
from numbers import Real

from corp.errors import RecipeError


def sparsity_of(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise RecipeError(f"{name}={value!r} is not a sparsity: give the share to remove, 0 <= {name} < 1")
    return float(value)


def non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise RecipeError(f"{name}={value!r} must be a finite number >= 0, or 'auto'")
    return float(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def multiple_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"round_to: {value!r} is not a whole number >= 1 (or 'fast')")
    return value


def globs_of(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple | set | frozenset) or not all(isinstance(g, str) and g for g in globs):
        raise RecipeError(f"skip={value!r} must be a glob or a list of globs over site names, such as 'blocks.0.*'")
    return tuple(sorted(globs)) if isinstance(globs, set | frozenset) else tuple(globs)
