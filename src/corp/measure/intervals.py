"""95 % intervals, because samples are finite; everything here needs only additive sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from torch import Tensor

Z = 1.96  # a normal variable is within this many standard deviations of its mean 95 % of the time


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval; the ends are None if there are too few samples."""

    value: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the estimate."""
        low, high = (None if end is None else function(end) for end in self[1:])
        return Interval(function(self.value), low, high)

    def __format__(self, spec: str) -> str:
        """Write "value [low, high]", each number by `spec`."""
        ends = "" if self.low is None or self.high is None else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return f"{self.value:{spec}}{ends}"


def wilson(hits: int, n: int) -> Interval:
    """Wilson's score interval of a proportion, which unlike p ± z·se is valid at 0 and at 1."""
    p, shrink = hits / n, 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / shrink
    half = Z * sqrt(p * (1 - p) / n + (Z / (2 * n)) ** 2) / shrink
    # Rounding must not put the estimate outside its own interval.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def paired_difference(gained: int, lost: int, n: int) -> Interval:
    """Difference of two proportions over the same n samples: `gained` right only for the first, `lost` for the second.

    Most samples are right, or wrong, for both and say nothing about the difference, so this is narrower than
    separate intervals imply. Agresti and Min (2005) add half a sample to each cell of the 2 x 2 table; without
    that, a small sample without disagreement would give an interval of width zero.
    """
    b, c, m = gained + 0.5, lost + 0.5, n + 2
    centre = (b - c) / m
    half = Z * sqrt((b + c) - (b - c) ** 2 / m) / m
    value = (gained - lost) / n
    return Interval(value, min(value, max(-1.0, centre - half)), max(value, min(1.0, centre + half)))


@dataclass
class Mean:
    """A streaming mean over samples, or over the tokens of sequences with an interval over the sequences.

    Tokens of one text are correlated, so they are not independent samples. It is the ratio estimator R = sum x / sum n
    over sequences with x_i in n_i tokens, with its linearised standard error; with n_i = 1 this is the plain mean.
    """

    n: int = 0  # samples or sequences
    tokens: int = 0
    total: float = 0.0
    xx: float = 0.0
    xn: float = 0.0
    nn: float = 0.0

    def add(self, sums: Tensor, tokens: Tensor | None = None) -> None:
        """Add values (B,), or sums (B,) over numbers of tokens (B,); sequences without tokens do not count."""
        x = sums.cpu().double()
        n = x.new_ones(len(x)) if tokens is None else tokens.cpu().double()
        self.n += int((n > 0).sum())
        self.tokens += int(n.sum())
        self.total += float(x.sum())
        self.xx += float(x @ x)
        self.xn += float(x @ n)
        self.nn += float(n @ n)

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    def interval(self) -> Interval:
        mean, k = self.mean, self.n
        if k < 2:
            return Interval(mean, None, None)
        squares = max(0.0, self.xx - 2 * mean * self.xn + mean**2 * self.nn)  # sum of (x_i - R n_i)^2
        half = Z * sqrt(squares * k / (k - 1)) / self.tokens
        return Interval(mean, mean - half, mean + half)
