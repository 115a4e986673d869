"""Checks of a recipe's values: each returns the value in canonical form, or raises an error that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeAlias

from corp.errors import RecipeError
from corp.recipe.choices import AUTO, KINDS

Wanted: TypeAlias = float | tuple[float, float]  # a sparsity, or the range from which a target may choose it


def checked_sparsity(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise RecipeError(f"{name}={value!r} is not a share to remove, 0 <= {name} < 1{_of_percent(value)}")
    return float(value)


def checked_target(name: str, value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 1:
        raise RecipeError(f"{name}={value!r} must be {what}, 0 < {name} <= 1{_of_percent(value)}")
    return float(value)


def _of_percent(value: object) -> str:
    """A hint for users who give 50 instead of 0.5."""
    return f"; write {value / 100:g} for {value:g} %" if isinstance(value, int | float) and 2 <= value < 100 else ""


def non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise RecipeError(f"{name}={value!r} must be a finite number >= 0")
    return float(value)


def require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def require_auto_or_flag(name: str, value: object) -> None:
    if value != AUTO and not isinstance(value, bool):
        raise RecipeError(f"{name}={value!r} is not one of 'auto', True, False")


def globs_of(value: object) -> tuple[str, ...]:
    """The globs of `skip`; a single one may be a string."""
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple | set | frozenset) or not all(isinstance(g, str) and g for g in globs):
        raise RecipeError(f"skip={value!r} must be a glob or a list of globs over site names, such as 'blocks.0.*'")
    return tuple(sorted(globs)) if isinstance(globs, set | frozenset) else tuple(globs)


def overrides_of(value: object, *, ranges: bool) -> dict[str, dict[str, Wanted]]:
    """Shares by glob and kind; `ranges` of shares are allowed under a target."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"overrides={value!r} must look like {{'blocks.0.*': {{'mlp': 0.2}}}}")
    checked: dict[str, dict[str, Wanted]] = {}
    for glob, changes in value.items():
        if not isinstance(glob, str) or not isinstance(changes, Mapping) or not changes:
            raise RecipeError(f"overrides[{glob!r}]={changes!r} must look like {{'mlp': 0.2, 'attn': 0.1}}")
        unknown = sorted(str(key) for key in changes if key not in KINDS)
        if unknown:
            raise RecipeError(f"overrides[{glob!r}]: unknown key(s) {', '.join(unknown)}; it takes {', '.join(KINDS)}")
        checked[glob] = {str(kind): _share_or_range(f"overrides[{glob!r}][{kind!r}]", s) for kind, s in changes.items()}
        if not ranges and any(isinstance(wanted, tuple) for wanted in checked[glob].values()):
            raise RecipeError(
                f"overrides[{glob!r}]: a range is allowed only under a target, which chooses from it; give a number"
            )
    return checked


def _share_or_range(name: str, value: object) -> Wanted:
    if not isinstance(value, list | tuple):
        return checked_sparsity(name, value)
    if len(value) != 2 or (low := checked_sparsity(name, value[0])) > (high := checked_sparsity(name, value[1])):
        raise RecipeError(f"{name}={value!r} is not a range of sparsities: give (least, most), such as (0.0, 0.3)")
    return low, high


def tokens_of(value: object, *, has_target: bool, params: bool) -> str | tuple[int, ...] | None:
    """Tokens to merge: None, "auto" under a target other than `params`, or the number in every block."""
    if value is None:
        return None
    if value == AUTO:
        if params:
            raise RecipeError(
                "tokens='auto' cannot go with target_params: merging saves operations and time, and no parameters"
            )
        if not has_target:
            raise RecipeError(
                "tokens='auto' chooses tokens within target_macs, target_latency or min_agreement; give one of "
                "them, or a list of numbers"
            )
        return AUTO
    if not isinstance(value, list | tuple) or any(isinstance(r, bool) or not isinstance(r, int) for r in value):
        raise RecipeError(f"tokens={value!r} is not 'auto' or a list with the tokens to merge in every block")
    return tuple(value)


def check_sequential(sequential: bool | str, samples: object, compensate: str) -> None:
    if sequential is True and compensate != "full":
        raise RecipeError(f"sequential=True refits compensated layers, so it cannot go with compensate={compensate!r}")
    if samples is None:
        return
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise RecipeError(f"sequential_samples={samples!r} is not a whole number >= 1")
    if sequential is False or compensate != "full":
        raise RecipeError("sequential_samples is used by the refit only: it cannot go with sequential=False")


def check_equal_heads(equal_heads: object, attn: float, vo: float) -> None:
    if not isinstance(equal_heads, bool):
        raise RecipeError(f"equal_heads={equal_heads!r} is not True or False")
    if equal_heads and vo not in (0.0, attn):
        raise RecipeError(
            f"equal_heads gives values the width of queries and keys, so vo={vo:g} cannot differ from attn={attn:g}; "
            "leave vo out"
        )
