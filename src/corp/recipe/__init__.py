"""What is asked for: plain values come in, a checked and frozen `Recipe` goes out.

It imports errors and io only; every package after it may import it, by the names listed here.
"""

from corp.recipe.choices import (
    AUTO,
    BASES,
    BUDGET,
    COMPENSATIONS,
    COORDINATES,
    GAIN,
    HOW,
    KINDS,
    PRESETS,
    RANKINGS,
    REMOVE,
    ROTARY,
    SHARED,
    SUBSPACE,
    TOGETHER,
    UNIFORM,
)
from corp.recipe.recipe import Recipe, preset_of
from corp.recipe.rounding import FAST, ROUNDING_KEYS, kept_width

__all__ = [
    "AUTO",
    "BASES",
    "BUDGET",
    "COMPENSATIONS",
    "COORDINATES",
    "FAST",
    "GAIN",
    "HOW",
    "KINDS",
    "PRESETS",
    "RANKINGS",
    "REMOVE",
    "ROTARY",
    "ROUNDING_KEYS",
    "SHARED",
    "SUBSPACE",
    "TOGETHER",
    "UNIFORM",
    "Recipe",
    "kept_width",
    "preset_of",
]
