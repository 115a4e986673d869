"""Measures of redundancy, by their definitions."""

from __future__ import annotations

import math


def brute_rank(values: list[float]) -> float:
    """The effective rank of a spectrum."""
    positive = [v / sum(values) for v in values if v > 0]
    return math.prod(p**-p for p in positive)  # exp of the entropy, without exp, log or a sum


def brute_k(values: list[float], share: float) -> int:
    """The smallest size at which any set at all holds the share: every size, its best set."""
    for size in range(1, len(values) + 1):
        if sum(sorted(values)[-size:]) >= share * sum(values) - 1e-9:
            return size
    raise AssertionError
