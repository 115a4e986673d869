"""95 % intervals, because samples are finite: everything here needs only sums that add."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from torch import Tensor

Z = 1.96  # a normal variable is within this many standard deviations of its mean 95 % of the time


class Interval(NamedTuple):
    """An estimate and where the true value lies with 95 % confidence; ends of None: too few samples to say."""

    value: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


def wilson(hits: int, n: int) -> Interval:
    """Wilson's score interval of a proportion: unlike p ± z·se, sound at 0 and at 1."""
    p, shrink = hits / n, 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / shrink
    half = Z * sqrt(p * (1 - p) / n + (Z / (2 * n)) ** 2) / shrink
    # Rounding must not put the estimate outside its own interval.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def paired_difference(gained: int, lost: int, n: int) -> Interval:
    """Difference of two proportions over the same n samples: `gained` right only for the first, `lost` for the second.

    Most samples are right, or wrong, for both and say nothing about the difference, so this is narrower than the
    two intervals taken apart. Agresti and Min (2005): half a sample is added to each cell of the 2 x 2 table; without
    it, no disagreement in a small sample would come out as certainty.
    """
    b, c, m = gained + 0.5, lost + 0.5, n + 2
    centre = (b - c) / m
    half = Z * sqrt((b + c) - (b - c) ** 2 / m) / m
    value = (gained - lost) / n
    return Interval(value, min(value, max(-1.0, centre - half)), max(value, min(1.0, centre + half)))


@dataclass
class Mean:
    """A streaming mean with its standard error."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        self.n += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    def interval(self) -> Interval:
        mean = self.total / self.n
        if self.n < 2:
            return Interval(mean, None, None)
        variance = max(0.0, (self.squares - self.n * mean**2) / (self.n - 1))
        half = Z * sqrt(variance / self.n)
        return Interval(mean, mean - half, mean + half)


@dataclass
class PerToken:
    """A mean over tokens with an interval over sequences: tokens of one text are alike, no samples of their own.

    The ratio estimator R = sum x / sum n over sequences with x_i in n_i tokens, and its linearised standard error.
    """

    sequences: int = 0
    tokens: int = 0
    total: float = 0.0
    xx: float = 0.0
    xn: float = 0.0
    nn: float = 0.0

    def add(self, sums: Tensor, tokens: Tensor) -> None:
        """Per sequence (B,): the sum over its tokens, and how many they are; sequences without any do not count."""
        x, n = sums.cpu().double(), tokens.cpu().double()
        self.sequences += int((n > 0).sum())
        self.tokens += int(n.sum())
        self.total += float(x.sum())
        self.xx += float((x * x).sum())
        self.xn += float((x * n).sum())
        self.nn += float((n * n).sum())

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    def interval(self) -> Interval:
        mean, k = self.mean, self.sequences
        if k < 2:
            return Interval(mean, None, None)
        squares = max(0.0, self.xx - 2 * mean * self.xn + mean**2 * self.nn)  # sum of (x_i - R n_i)^2
        half = Z * sqrt(squares * k / (k - 1)) / self.tokens
        return Interval(mean, mean - half, mean + half)
