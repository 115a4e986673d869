"""Sequential fitting: what a linear layer adds to its output to close the gap to the dense model's stream.

After the layer the pruned model's stream differs from the dense one's by a gap g. The layer sees x, so the part of g
that is linear in x can be added to its weights, W + R and b + c:

    R = C_gx (Sigma + lambda I)^-1        c = E[g] - R mu

with C_gx the covariance of g and x. The ridge pulls towards the layer's current weights. Without an intercept the same
formulas hold with both means 0 and raw second moments in place of covariances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.linalg import energy_in, mean_diagonal, solve_ridge
from corp.numerics.place import Place

# Relative, as everywhere. The last hardly corrects anything; if even that is harmful, nothing is corrected.
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)


class GapMoments(NamedTuple):
    """Moments of a layer's input x and of the gap g after it."""

    mean: Tensor  # (D,)
    cov: Tensor  # (D, D)
    gap: Tensor  # (o,), E[g]
    cross: Tensor  # (o, D), covariance of g and x
    energy: float  # E||g - E[g]||^2

    def at(self, place: Place) -> GapMoments:
        """These moments on another device, or in another dtype."""
        mean, cov, gap, cross = (part.to(*place) for part in self[:4])
        return GapMoments(mean, cov, gap, cross, self.energy)


def mixed(first: GapMoments, second: GapMoments, share: float) -> GapMoments:
    """The moments of a mixture with this share of the first population and the rest of the second."""
    parts = ((first, share), (second, 1 - share))
    mean = share * first.mean + (1 - share) * second.mean
    gap = share * first.gap + (1 - share) * second.gap
    cov, cross = torch.zeros_like(first.cov), torch.zeros_like(first.cross)
    energy = 0.0
    for part, weight in parts:
        away, behind = part.mean - mean, part.gap - gap
        cov += weight * (part.cov + torch.outer(away, away))
        cross += weight * (part.cross + torch.outer(behind, away))
        energy += weight * (part.energy + float(behind.square().sum()))
    return GapMoments(mean, cov, gap, cross, energy)


class Correction(NamedTuple):
    """g ~ R x + c."""

    R: Tensor  # (o, D)
    c: Tensor  # (o,)


def fit_gap(moments: GapMoments, ridge: float) -> Correction:
    """Fit the gap to the input; lambda = ridge * mean diagonal of the covariance."""
    R = solve_ridge(moments.cov, moments.cross.mT, ridge * mean_diagonal(moments.cov)).mT
    return Correction(R, moments.gap - R @ moments.mean)


def gap_left(moments: GapMoments, fit: Correction) -> float:
    """E||g - R x - c||^2, exactly, for any correction."""
    mean, cov, gap, cross, energy = moments
    variance = energy - 2 * float((fit.R * cross).sum()) + energy_in(fit.R, cov)
    return max(0.0, variance) + float((gap - fit.R @ mean - fit.c).square().sum())


def gap_of(moments: GapMoments) -> float:
    """E||g||^2."""
    return moments.energy + float(moments.gap.square().sum())


def choose_ridge(seen: GapMoments, unseen: GapMoments, ridges: Sequence[float] = RIDGES) -> float | None:
    """The ridge whose fit on one part of the data leaves the smallest gap on the other; None if no fit reduces it.

    The remaining gap falls and then rises with the ridge, so ridges are tried from the middle on, downhill. A ridge at
    which the system has no Cholesky factor is skipped.
    """
    left: dict[int, float] = {}

    def measured(i: int) -> float:
        if i not in left:
            try:
                left[i] = gap_left(unseen, fit_gap(seen, ridges[i]))
            except SingularSystemError:
                left[i] = math.inf
        return left[i]

    best = len(ridges) // 2
    while (least := min(range(min(best + 1, len(ridges) - 1), max(-1, best - 2), -1), key=measured)) != best:
        best = least
    return ridges[best] if measured(best) < gap_of(unseen) else None
