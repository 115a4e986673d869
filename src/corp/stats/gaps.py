"""Streaming sums of a linear layer's input together with the gap behind it, for sequential fitting."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.numerics.refit import GapMoments
from corp.stats.moments import CHUNK, Moments, shift_of, sum_device


class GapSums:
    """The moments of x (D), and over the same tokens the sums of g (o), ||g||^2 and g (x - shift)^T."""

    def __init__(self, width: int, outputs: int) -> None:
        self.inputs = Moments(width)
        self.gap = torch.zeros(outputs, dtype=torch.float64)
        self.square = 0.0
        self.cross = torch.zeros(outputs, width, dtype=torch.float64)

    def update(self, x: Tensor, gap: Tensor) -> None:
        """Add tokens x (N, D) and gap (N, o)."""
        if len(x) == 0:
            return
        if self.inputs.shift is None:
            self.inputs.shift = shift_of(x)
        self.inputs.update(x)
        self.gap, self.cross = self.gap.to(sum_device(x)), self.cross.to(sum_device(x))
        shift = self.inputs.shift
        for some, behind in zip(x.split(CHUNK), gap.split(CHUNK), strict=True):
            y = some if some.dtype == torch.float64 else some.float()
            y = y - shift.to(y)
            g = behind.to(y.dtype)
            self.cross += (g.mT @ y).to(self.cross)
            self.gap += g.sum(0).to(self.gap)
            self.square += float(torch.linalg.vector_norm(g)) ** 2

    def __add__(self, other: GapSums) -> GapSums:
        """Both, which must have one shift."""
        both = GapSums(self.inputs.width, len(self.gap))
        both.inputs = self.inputs + other.inputs
        both.gap, both.cross = self.gap + other.gap, self.cross + other.cross
        both.square = self.square + other.square
        return both

    def moments(self, intercept: bool) -> GapMoments:
        """Centred, or without an intercept about zero; see numerics.refit."""
        n = self.inputs.n
        mean, cov, gap = self.inputs.mean, self.inputs.cov, self.gap / n
        assert self.inputs.shift is not None
        about_shift = self.cross / n  # E[g (x - shift)^T]
        if intercept:
            cross = about_shift - torch.outer(gap, mean - self.inputs.shift)
            return GapMoments(mean, cov, gap, cross, self.square / n - float(gap.square().sum()))
        raw = about_shift + torch.outer(gap, self.inputs.shift)
        second = cov + torch.outer(mean, mean)
        return GapMoments(torch.zeros_like(mean), second, torch.zeros_like(gap), raw, self.square / n)
