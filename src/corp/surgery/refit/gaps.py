"""Streaming sums of a linear layer's input together with the gap after it, for sequential fitting."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.calibration.moments import BLOCK, CHUNK, add_products, mirrored, shift_of, sum_device
from corp.numerics.refit import GapMoments, mixed


class GapSums:
    """Over tokens, with y = x - shift (D) and the gap g (o): the sums of y, y y^T, g, g y^T and ||g||^2."""

    def __init__(self, width: int, outputs: int) -> None:
        self.shift: Tensor | None = None
        self.n = 0
        self.total = torch.zeros(width, dtype=torch.float64)
        self.outer = torch.zeros(width, width, dtype=torch.float64)  # upper triangle by blocks
        self.gap = torch.zeros(outputs, dtype=torch.float64)
        self.cross = torch.zeros(outputs, width, dtype=torch.float64)
        self.square = 0.0

    def update(self, x: Tensor, gap: Tensor) -> None:
        """Add tokens x (N, D) and gap (N, o)."""
        if len(x) == 0:
            return
        if self.shift is None:
            self.shift = shift_of(x)
        home = sum_device(x)
        self.total, self.outer, self.gap, self.cross = (
            sums.to(home) for sums in (self.total, self.outer, self.gap, self.cross)
        )
        products: list[Tensor] = []
        for some, behind in zip(x.split(CHUNK), gap.split(CHUNK), strict=True):
            y = some if some.dtype == torch.float64 else some.float()
            y = y - self.shift.to(y)
            g = behind.to(y.dtype)
            self.total += y.sum(0).to(self.total)
            add_products(products, y)
            self.gap += g.sum(0).to(self.gap)
            self.cross += (g.mT @ y).to(self.cross)
            self.square += float(torch.linalg.vector_norm(g)) ** 2
        for start, block in zip(range(0, len(self.outer), BLOCK), products, strict=True):
            self.outer[start : start + BLOCK, start:] += block.to(self.outer)
        self.n += len(x)

    def __add__(self, other: GapSums) -> GapSums:
        """The sum of both, which must have the same shift."""
        both = GapSums(len(self.total), len(self.gap))
        both.shift, both.n = self.shift, self.n + other.n
        both.total, both.outer = self.total + other.total, self.outer + other.outer
        both.gap, both.cross = self.gap + other.gap, self.cross + other.cross
        both.square = self.square + other.square
        return both

    def moments(self, intercept: bool) -> GapMoments:
        """Centred moments or, without an intercept, raw ones; see numerics.refit."""
        assert self.shift is not None  # tokens were seen
        away, gap = self.total / self.n, self.gap / self.n  # means, that of x relative to the shift
        cov = mirrored((self.outer / self.n).addr_(away, away, alpha=-1))
        cross = self.cross / self.n - torch.outer(gap, away)
        mean, energy = self.shift + away, self.square / self.n
        if intercept:
            return GapMoments(mean, cov, gap, cross, energy - float(gap.square().sum()))
        raw = cross + torch.outer(gap, mean)
        return GapMoments(torch.zeros_like(mean), cov + torch.outer(mean, mean), torch.zeros_like(gap), raw, energy)


class TokenSums:
    """Sums of tokens that the model's output is read from, which have the total weight `share`, and of all others."""

    def __init__(self, width: int, outputs: int, share: float = 1.0) -> None:
        self.share = share
        self.read, self.other = GapSums(width, outputs), GapSums(width, outputs)

    def shift_by(self, shift: Tensor) -> None:
        self.read.shift = self.other.shift = shift

    def update(self, x: Tensor, gap: Tensor, read: Tensor, other: Tensor) -> None:
        """Add tokens x (N, D) and gap (N, o); the masks (N,) say which are read, and which are not."""
        for sums, rows in ((self.read, read), (self.other, other)):
            places = rows.nonzero()[:, 0]
            if len(places) == len(x):  # no copies
                sums.update(x, gap)
            else:
                sums.update(x.index_select(0, places), gap.index_select(0, places))

    @property
    def n(self) -> int:
        return self.read.n + self.other.n

    @property
    def square(self) -> float:
        return self.read.square + self.other.square

    def __add__(self, more: TokenSums) -> TokenSums:
        both = TokenSums(len(self.read.total), len(self.read.gap), self.share)
        both.read, both.other = self.read + more.read, self.other + more.other
        return both

    def moments(self, intercept: bool) -> GapMoments:
        parts = [sums.moments(intercept) for sums in (self.read, self.other) if sums.n]
        return mixed(parts[0], parts[1], self.share) if len(parts) == 2 else parts[0]
