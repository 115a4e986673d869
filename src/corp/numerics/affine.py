"""Affine compensation of pruned MLP channels (paper: section 3.4, Algorithm 3, Propositions C.1.1 and C.1.2).

Without an intercept the same formulas hold with mean = 0 and the raw second moment in place of cov.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.linalg import mean_diagonal, solve_ridge, solve_vanishing


class Affine(NamedTuple):
    """The predictor x_P ~ B x_S + c."""

    B: Tensor  # (P, S)
    c: Tensor  # (P,)


class Folded(NamedTuple):
    """The second linear layer after compensation."""

    W: Tensor  # (o, S)
    b: Tensor  # (o,)


class Distortion(NamedTuple):
    """Expected squared error of a site's output: what this compensation leaves, the optimum, without any."""

    J: float
    J_star: float
    J_uncomp: float
    rho2: float


def fit_affine(mean: Tensor, cov: Tensor, kept: Tensor, pruned: Tensor, *, ridge: float) -> Affine:
    """Predict the pruned channels from the kept ones by ridge regression.

        B = Sigma_PS (Sigma_SS + lambda I)^-1        c = mu_P - B mu_S

    mean (D,) and cov (D, D) are averages over calibration tokens; lambda = ridge * mean diagonal of
    the whole cov, so neither the number of tokens nor the scale of the activations moves it.
    `kept` (S,) and `pruned` (P,) partition range(D).
    """
    Sigma_SS = cov[kept[:, None], kept]  # (S, S)
    Sigma_SP = cov[kept[:, None], pruned]  # (S, P)
    B = solve_ridge(Sigma_SS, Sigma_SP, ridge * mean_diagonal(cov)).mT
    return Affine(B, mean[pruned] - B @ mean[kept])


def best_affine(mean: Tensor, cov: Tensor, kept: Tensor, pruned: Tensor) -> Affine:
    """The unregularised optimum: fit_affine as the ridge vanishes."""
    Sigma_SS, Sigma_SP = cov[kept[:, None], kept], cov[kept[:, None], pruned]
    B = solve_vanishing(Sigma_SS, Sigma_SP, mean_diagonal(cov)).mT
    return Affine(B, mean[pruned] - B @ mean[kept])


def mean_only(mean: Tensor, kept: Tensor, pruned: Tensor) -> Affine:
    """The predictor that knows only the mean: B = 0, c = mu_P."""
    return Affine(mean.new_zeros(len(pruned), len(kept)), mean[pruned])


def nothing(mean: Tensor, kept: Tensor, pruned: Tensor) -> Affine:
    """No compensation: x_P ~ 0."""
    return Affine(mean.new_zeros(len(pruned), len(kept)), mean.new_zeros(len(pruned)))


def fold(W: Tensor, b: Tensor, kept: Tensor, pruned: Tensor, fit: Affine) -> Folded:
    """W_S + W_P B and b + W_P c, for the layer y = W x + b with W (o, D), b (o,)."""
    W_P = W[:, pruned]
    return Folded(W[:, kept] + W_P @ fit.B, b + W_P @ fit.c)


def error(W: Tensor, mean: Tensor, cov: Tensor, kept: Tensor, pruned: Tensor, fit: Affine) -> float:
    """E||W_P (x_P - B x_S - c)||^2, exactly, for any predictor (Proposition C.1.1, with the third term set right).

    = tr W_P (Sigma_PP - 2 sym(B Sigma_SP) + B Sigma_SS B^T) W_P^T + ||W_P (mu_P - B mu_S - c)||^2
    """
    W_P = W[:, pruned]
    variance = (W_P @ cov[pruned[:, None], pruned] * W_P).sum()
    if bool(fit.B.any()):  # without a prediction there are three products less
        V = W_P @ fit.B  # (o, S)
        variance -= 2 * (V @ cov[kept[:, None], pruned] * W_P).sum()
        variance += (V @ cov[kept[:, None], kept] * V).sum()
    bias = W_P @ (mean[pruned] - fit.B @ mean[kept] - fit.c)
    return max(0.0, float(variance + bias.square().sum()))


def distortion(W: Tensor, mean: Tensor, cov: Tensor, kept: Tensor, pruned: Tensor, fit: Affine) -> Distortion:
    """What `fit` costs, beside the best that any affine predictor could do and doing nothing.

    rho^2 is the share of the variance of W_P x_P that is linear in x_S (Proposition C.1.2).
    """
    best = best_affine(mean, cov, kept, pruned)
    J_star = error(W, mean, cov, kept, pruned, best)
    variance = error(W, mean, cov, kept, pruned, mean_only(mean, kept, pruned))
    return Distortion(
        J=error(W, mean, cov, kept, pruned, fit),
        J_star=J_star,
        J_uncomp=error(W, mean, cov, kept, pruned, nothing(mean, kept, pruned)),
        rho2=min(1.0, max(0.0, 1 - J_star / variance)) if variance > 0 else 1.0,
    )


def output_energy(W: Tensor, mean: Tensor, cov: Tensor) -> float:
    """E||W x||^2: the scale to which a distortion is compared."""
    return float((W @ cov * W).sum() + torch.linalg.vector_norm(W @ mean).square())
