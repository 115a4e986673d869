"""How many dimensions a sparsity keeps, and the multiples to which they are rounded up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from corp.errors import RecipeError
from corp.recipe.choices import AUTO

ROUNDING_KEYS = {"mlp": "mlp", "attn": "head", "vo": "head"}  # kind of site -> its key in round_to
FAST = {"mlp": 64, "head": 8}  # widths that fill tiles of kernels and blocks of quantisers
BLOCK, SUPERBLOCK = 32, 256  # weights of a row that llama.cpp quantises together: simple formats, K-quants
NAMED_MULTIPLES = ("auto", "fast", "gguf")
# What round_to="auto" rounds to, by width: the speed of coarser multiples is not worth their loss of accuracy.
EVEN = {"mlp": {512: 8}, "head": {64: 4, 128: 8}}


def kept_width(width: int, sparsity: float, multiple: int = 1) -> int:
    """ceil((1 - s) d) in exact arithmetic (floats give 57 for 0.3 * 80 removed), rounded up to `multiple`.

    This rule reproduces all parameter counts of the paper's efficiency table exactly.
    """
    exact = max(1, math.ceil(round((1 - sparsity) * width, 9)))
    return min(width, -(-exact // multiple) * multiple)


def multiple_for(round_to: int | str | Mapping[str, int], kind: str, width: int) -> int:
    """The multiple to which kept widths are rounded up at sites of this kind, `width` wide in the dense model."""
    if isinstance(round_to, int):
        return round_to
    if round_to == "gguf":
        multiples: Mapping[str, int] = {"mlp": SUPERBLOCK if width >= 16 * SUPERBLOCK else BLOCK}
    elif round_to == AUTO:
        multiples = {
            key: max((multiple for least, multiple in steps.items() if width >= least), default=1)
            for key, steps in EVEN.items()
        }
    else:
        multiples = FAST if isinstance(round_to, str) else round_to
    return multiples.get(ROUNDING_KEYS[kind], 1)


def check_rounding(value: object) -> None:
    if value in NAMED_MULTIPLES:
        return
    known = sorted(set(ROUNDING_KEYS.values()))
    if isinstance(value, Mapping) and (unknown := sorted(str(key) for key in value if key not in known)):
        raise RecipeError(f"round_to: unknown key(s) {', '.join(unknown)}; it takes {', '.join(known)}")
    for multiple in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise RecipeError(f"round_to: {multiple!r} is not a whole number >= 1 (or 'auto', 'fast', 'gguf')")


def nearest(value: float, limits: tuple[float, float]) -> float:
    """The number within the limits nearest to `value`."""
    low, high = limits
    return min(max(value, low), high)
