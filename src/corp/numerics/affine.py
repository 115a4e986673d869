"""Affine compensation of pruned MLP channels (paper: section 3.4, Algorithm 3, Propositions C.1.1 and C.1.2).

The paper predicts the pruned channels, x_P ~ B x_S + c, and folds W_P B and W_P c into the layer y = W x + b. Only
these products are used, so they are solved for directly: y_P = W_P x_P ~ V x_S + c with V = W_P B, o unknowns per kept
channel instead of P. Without an intercept the same formulas hold with mean = 0 and the raw second moment in place of
the covariance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.linalg import energy_in, explained_at_best, mean_diagonal, solve_ridge, solve_vanishing


class Removal(NamedTuple):
    """What a choice of channels leaves to predict: second moments of x_S and of y_P = W_P x_P."""

    Sigma_SS: Tensor  # (S, S)
    C: Tensor  # (S, o), covariance of x_S and y_P: Sigma_SP W_P^T
    mean_kept: Tensor  # (S,)
    mean_lost: Tensor  # (o,), of y_P
    variance: float  # tr W_P Sigma_PP W_P^T, of y_P
    scale: float  # mean diagonal of the whole covariance, which makes the ridge relative


class Affine(NamedTuple):
    """The predictor y_P ~ V x_S + c."""

    V: Tensor  # (o, S), the paper's W_P B
    c: Tensor  # (o,), its W_P c


class Folded(NamedTuple):
    """The second linear layer after compensation."""

    W: Tensor  # (o, S)
    b: Tensor  # (o,)


class Distortion(NamedTuple):
    """Expected squared error of a site's output: with this compensation, with the best one, and without any."""

    J: float
    J_star: float
    J_uncomp: float
    rho2: float


def removal(W: Tensor, mean: Tensor, cov: Tensor, kept: Tensor, pruned: Tensor) -> Removal:
    """The moments from which every fit and error below is computed; W (o, D), mean (D,), cov (D, D).

    `kept` (S,) and `pruned` (P,) partition range(D).
    """
    W_P = W[:, pruned]  # (o, P)
    return Removal(
        cov[kept[:, None], kept],
        (W_P @ cov[pruned[:, None], kept]).mT,
        mean[kept],
        W_P @ mean[pruned],
        energy_in(W_P, cov[pruned[:, None], pruned]),
        mean_diagonal(cov),
    )


def fit_affine(given: Removal, *, ridge: float) -> Affine:
    """Predict what was removed from what is kept by ridge regression.

        V = C^T (Sigma_SS + lambda I)^-1        c = E[y_P] - V mu_S

    lambda = ridge * mean diagonal of the whole covariance, so the ridge depends neither on the number of tokens nor on
    the scale of the activations.
    """
    return _centred(given, solve_ridge(given.Sigma_SS, given.C, ridge * given.scale).mT)


def best_affine(given: Removal) -> Affine:
    """The unregularised optimum: fit_affine as the ridge vanishes."""
    return _centred(given, solve_vanishing(given.Sigma_SS, given.C, given.scale).mT)


def mean_only(given: Removal) -> Affine:
    """The predictor that uses only the mean: V = 0, c = E[y_P]."""
    return _centred(given, torch.zeros_like(given.C).mT)


def nothing(given: Removal) -> Affine:
    """No compensation: y_P ~ 0."""
    return Affine(torch.zeros_like(given.C).mT, torch.zeros_like(given.mean_lost))


def _centred(given: Removal, V: Tensor) -> Affine:
    return Affine(V, given.mean_lost - V @ given.mean_kept)


def fold(W: Tensor, b: Tensor, kept: Tensor, fit: Affine) -> Folded:
    """W_S + V and b + c, for the layer y = W x + b with W (o, D), b (o,)."""
    return Folded(W[:, kept] + fit.V, b + fit.c)


def error(given: Removal, fit: Affine) -> float:
    """E||y_P - V x_S - c||^2, exactly, for any predictor (Proposition C.1.1, with the third term corrected).

    = tr W_P Sigma_PP W_P^T - 2 <V, C^T> + <V Sigma_SS, V> + ||E[y_P] - V mu_S - c||^2
    """
    variance = given.variance
    if bool(fit.V.any()):  # without a prediction, two products fewer
        variance += energy_in(fit.V, given.Sigma_SS) - 2 * float((fit.V * given.C.mT).sum())
    bias = given.mean_lost - fit.V @ given.mean_kept - fit.c
    return max(0.0, variance + float(bias.square().sum()))


def distortion(given: Removal, fit: Affine) -> Distortion:
    """The error of `fit`, of the best affine predictor, and of no compensation.

    rho^2 is the share of the variance of y_P that is linear in x_S (Proposition C.1.2).
    """
    J, J_uncomp = error(given, fit), given.variance + float(given.mean_lost.square().sum())
    J_star = min(J, best_error(given))
    return Distortion(J, J_star, J_uncomp, explained(J_star, given.variance))


def best_error(given: Removal) -> float:
    """The error of best_affine, without computing it: the variance of y_P less what x_S explains."""
    return max(0.0, given.variance - explained_at_best(given.Sigma_SS, given.C, given.scale))


def explained(left: float, total: float) -> float:
    """rho^2 = 1 - left / total, both errors; 1 if there was none, 0 if more is left than there was."""
    return max(0.0, 1 - left / total) if total > 0 else 1.0


def energy_before(given: Removal, W_S: Tensor) -> float:
    """E||W x||^2 before the removal, from its moments: that of y_S = W_S x_S, of y_P, and twice what they share."""
    shared = 2 * float((W_S * given.C.mT).sum())
    mean = W_S @ given.mean_kept + given.mean_lost
    return energy_in(W_S, given.Sigma_SS) + shared + given.variance + float(mean.square().sum())


def output_energy(W: Tensor, mean: Tensor, cov: Tensor) -> float:
    """E||W x||^2: the scale with which a distortion is compared."""
    return energy_in(W, cov) + float((W @ mean).square().sum())
