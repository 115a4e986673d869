"""Streaming first and second moments of the hidden units of one MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.errors import StatisticsError

ACTIVE_EPS = 1e-2  # |x| above this counts as active (the paper's "active probability" names no number)
BLOCK = 512  # columns per block of the upper triangle: below it the products are too thin to be fast


class Moments:
    """Sums over tokens about a fixed shift: n, sum y, sum y y^T with y = x - shift, and how often |x| > eps.

    Products are float32 (float64 for float64 models), sums float64. The shift is the first batch's mean:
    without it a large mean would drown a small variance.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.n = 0
        self.shift: Tensor | None = None  # (D,)
        self.total = torch.zeros(width, dtype=torch.float64)  # (D,)
        self.outer = torch.zeros(width, width, dtype=torch.float64)  # (D, D), upper triangle by blocks
        self.active = torch.zeros(width, dtype=torch.float64)  # (D,)

    def update(self, x: Tensor) -> None:
        """Add the tokens x (n, D)."""
        if len(x) == 0:
            return
        x = x if x.dtype == torch.float64 else x.float()
        if self.shift is None:
            self.shift = x.mean(0).to(sum_device(x), torch.float64)
            self.to(self.shift.device)
        y = x - self.shift.to(x)  # (n, D)
        self.n += len(x)
        self.total += y.sum(0).to(self.total)
        self.active += (x.abs() > ACTIVE_EPS).sum(0).to(self.active)
        add_outer(self.outer, y)

    def to(self, device: torch.device) -> None:
        self.total, self.outer, self.active = (t.to(device) for t in (self.total, self.outer, self.active))
        self.shift = None if self.shift is None else self.shift.to(device)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.total).all() and torch.isfinite(self.outer.diagonal()).all())

    @property
    def mean(self) -> Tensor:
        """E[x] (D,)."""
        return self._shift() + self.total / self.n

    @property
    def cov(self) -> Tensor:
        """E[(x - mu)(x - mu)^T] (D, D)."""
        upper = self.outer.triu()
        delta = self.total / self.n
        return (upper + upper.triu(1).mT) / self.n - torch.outer(delta, delta)

    @property
    def active_share(self) -> Tensor:
        """P(|x| > eps) (D,)."""
        return self.active / self.n

    def __add__(self, other: Moments) -> Moments:
        if self.width != other.width:
            raise StatisticsError(f"moments of {self.width} and of {other.width} channels do not add")
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        both = Moments(self.width)
        both.shift, both.n = self._shift(), self.n + other.n
        rebased = other._rebased(both.shift)
        both.total = self.total + rebased.total
        both.outer = self.outer + rebased.outer
        both.active = self.active + other.active
        return both

    def _rebased(self, shift: Tensor) -> Moments:
        """The same sums about another shift: y' = y + e with e = old shift - new shift."""
        e = self._shift() - shift
        moved = Moments(self.width)
        moved.n, moved.shift, moved.active = self.n, shift, self.active
        moved.total = self.total + self.n * e
        cross = torch.outer(self.total, e)
        moved.outer = self.outer + cross + cross.mT + self.n * torch.outer(e, e)
        return moved

    def _shift(self) -> Tensor:
        if self.shift is None:
            raise StatisticsError("no tokens were seen at this site")
        return self.shift


def add_outer(into: Tensor, y: Tensor) -> None:
    """into += y^T y on the blocks of the upper triangle: half the work of the full product."""
    D = y.shape[1]
    for start in range(0, D, BLOCK):
        stop = min(start + BLOCK, D)
        into[start:stop, start:] += (y[:, start:stop].mT @ y[:, start:]).to(into)


def sum_device(x: Tensor) -> torch.device:
    """Where float64 sums live: beside the data, except on MPS, which has no float64."""
    return torch.device("cpu") if x.device.type == "mps" else x.device
