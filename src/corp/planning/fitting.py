"""The compensation of a site, from its sums and the kept channels: the step that plan and apply share."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.calibration.head_grams import HeadGrams
from corp.calibration.moments import Moments
from corp.errors import SingularSystemError
from corp.numerics import affine, logit, rotary
from corp.numerics.kronecker import ENOUGH

LARGEST_RIDGE = 1e3  # the most that a fit raises its ridge to: nothing is compensated there


def moments_for_fit(moments: Moments, intercept: bool) -> tuple[Tensor, Tensor]:
    """Mean and covariance; without an intercept, zero and the raw second moment, for which the same formulas hold."""
    mean, cov = moments.mean, moments.cov()
    if intercept:
        return mean, cov
    return torch.zeros_like(mean), cov.addr_(mean, mean)


def split(width: int, kept: Tensor) -> Tensor:
    """The complement of `kept` in range(width)."""
    pruned = torch.ones(width, dtype=torch.bool, device=kept.device)
    pruned[kept] = False
    return pruned.nonzero().squeeze(1)


def fit_linear(given: affine.Removal, compensate: str, ridge: float) -> affine.Affine:
    if compensate == "full":
        return affine.fit_affine(given, ridge=ridge)
    return (affine.mean_only if compensate == "mean" else affine.nothing)(given)


def fit_solvable(given: affine.Removal, compensate: str, ridge: float) -> tuple[affine.Affine, float]:
    """The fit at this ridge, raised by powers of ten until the system can be solved, and the ridge that was used.

    Values need this in a basis in which they have unit variance, which magnifies the rounding errors of their sums.
    """
    while True:
        try:
            return fit_linear(given, compensate, ridge), ridge
        except SingularSystemError:
            if not 0 < ridge < LARGEST_RIDGE:
                raise
            ridge *= 10


def head_system(grams: HeadGrams, kept: Tensor, pruned: Tensor) -> logit.LogitSystem:
    return logit.logit_system(grams.normal_of(kept), grams.cross_of(kept, pruned), grams.energy(), pruned)


def fit_head(system: logit.LogitSystem, compensate: str, ridge: float) -> Tensor:
    """M (S, S). Logits have no bias, so compensating the mean alone changes nothing."""
    if compensate == "full":
        return logit.fit_logit(system, ridge=ridge, tolerance=ENOUGH)
    return torch.zeros_like(system.h)


def fit_rotated(system: rotary.PairSystem, compensate: str, ridge: float) -> Tensor:
    """(a, b) stacked (2S,) for the kept pairs of a rotary head."""
    return rotary.fit_pairs(system, ridge=ridge) if compensate == "full" else torch.zeros_like(system.h)
