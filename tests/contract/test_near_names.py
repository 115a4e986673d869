"""Names by prefix and edit distance, against the definition."""

from __future__ import annotations

import functools
import random

import timm

from corp.adapters.near_names import near, prefix_distance
from tests.helpers.seeds import seed


@functools.cache
def edits(a: str, b: str) -> int:
    """The edit distance as it is defined: the best of what can be done with the last letters."""
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[:-1], b) + 1, edits(a, b[:-1]) + 1, edits(a[:-1], b[:-1]) + (a[-1] != b[-1]))


def test_the_distance_is_the_least_to_any_prefix() -> None:
    draw = random.Random(seed())
    for _ in range(200):
        name, other = ("".join(draw.choices("abc", k=draw.randint(0, 6))) for _ in range(2))
        assert prefix_distance(name, other) == min(edits(name, other[:end]) for end in range(len(other) + 1))


def test_mistyped_models_of_timm() -> None:
    known = timm.list_models()
    assert near("deit_tinny", known)[0] == "deit_tiny_patch16_224"
    assert near("deit_tny_patch16_224", known)[0] == "deit_tiny_patch16_224"
    assert near("DeiT_small", known)[0] == "deit_small_patch16_224"
    assert near("resnet5O", known)[0] == "resnet50"
    assert near("xqzwvvkj_qqqq", known) == []
