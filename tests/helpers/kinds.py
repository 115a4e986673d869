"""One family of every kind in `make test`; the others, which differ in names, in `make test-real`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ROTARY = ["llama", "qwen2", "gpt-neox"]
KINDS = [
    *("vit", "swiglu-packed", "siglip", "scale-attn-norm"),
    *("hf-opt", "hf-gpt2-cross", "hf-whisper", "torch-decoder", "open-clip-tower"),
    *ROTARY,
]


def by_kind(names: Iterable[Any], kinds: Iterable[Any] = KINDS) -> list[Any]:
    """Values for pytest.mark.parametrize: all names, of which those that are not in `kinds` are slow."""
    wanted = set(kinds)
    return [name if name in wanted else pytest.param(name, marks=pytest.mark.slow) for name in names]
