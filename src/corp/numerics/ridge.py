"""The ridge that predicts best what it was not fitted on: every candidate is fitted on one part of the data and judged
on the other, both known by their sums only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from corp.numerics.affine import Affine, mean_only
from corp.numerics.affine import error as affine_error
from corp.numerics.linalg import mean_diagonal, solve_ridge
from corp.numerics.logit import LogitSystem
from corp.numerics.rotary import PairSystem

# Relative, as everywhere. Below, rounding of the sums decides; above, hardly anything is left of the fit.
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Errors on the held-out part that differ by less than this share of the smallest are equal: the larger ridge is safer.
EQUAL = 1e-3

System: TypeAlias = LogitSystem | PairSystem
Moments: TypeAlias = tuple[Tensor, Tensor]  # mean (D,), covariance (D, D)


class Choice(NamedTuple):
    """The ridge that was chosen, and what every candidate leaves unexplained on the held-out part."""

    ridge: float
    ridges: tuple[float, ...]
    unexplained: tuple[float, ...]  # shares of what was removed


def choose_affine(
    W: Tensor, seen: Moments, unseen: Moments, kept: Tensor, pruned: Tensor, ridges: Sequence[float] = RIDGES
) -> Choice:
    """For fit_affine: W (o, D) is the second linear; one Cholesky factorisation per candidate.

    Only what reaches the output is solved for, V = W_P B (o rows instead of P): a candidate costs less than a fit.
    """
    mean, cov = seen
    W_P = W[:, pruned]
    towards = cov[kept[:, None], pruned] @ W_P.mT  # (S, o): Sigma_SP W_P^T
    whole = affine_error(W, *unseen, kept, pruned, mean_only(unseen[0], kept, pruned))
    # The output is W_P x_P: judged as a layer of o pruned channels with the identity behind it.
    projected = _projected(unseen, W_P, kept, pruned)
    o, S = len(W), len(kept)
    channels, outputs = torch.arange(S), torch.arange(S, S + o)
    last = torch.cat([W.new_zeros(o, S), torch.eye(o, dtype=W.dtype, device=W.device)], 1)
    errors = []
    for ridge in ridges:
        V = solve_ridge(cov[kept[:, None], kept], towards, ridge * mean_diagonal(cov)).mT  # (o, S)
        fit = Affine(V, W_P @ mean[pruned] - V @ mean[kept])
        errors.append(affine_error(last, *projected, channels, outputs, fit))
    return _choice(ridges, errors, whole)


def _projected(moments: Moments, W_P: Tensor, kept: Tensor, pruned: Tensor) -> Moments:
    """Mean and covariance of (x_S, W_P x_P)."""
    mean, cov = moments
    between = cov[kept[:, None], pruned] @ W_P.mT  # (S, o)
    top = torch.cat([cov[kept[:, None], kept], between], 1)
    bottom = torch.cat([between.mT, W_P @ cov[pruned[:, None], pruned] @ W_P.mT], 1)
    return torch.cat([mean[kept], W_P @ mean[pruned]]), torch.cat([top, bottom])


def choose_system(systems: Iterable[tuple[System, System]], ridges: Sequence[float] = RIDGES) -> Choice:
    """For fit_logit and fit_pairs: one ridge for all heads of a site, by their summed error on the held-out part.

    Every head comes as its system on the fitted and on the held-out part; one head is in memory at a time.
    """
    errors, whole = [0.0] * len(ridges), 0.0
    for (G, h, _), (G_new, h_new, T_new) in systems:
        whole += T_new
        for i, ridge in enumerate(ridges):
            m = solve_ridge(G, h[:, None], ridge * mean_diagonal(G))[:, 0]
            errors[i] += max(0.0, float(T_new - 2 * m @ h_new + m @ (G_new @ m)))
    return _choice(ridges, errors, whole)


def _choice(ridges: Sequence[float], errors: Sequence[float], whole: float) -> Choice:
    least = min(errors)
    best = max(ridge for ridge, error in zip(ridges, errors, strict=True) if error <= least * (1 + EQUAL))
    return Choice(best, tuple(ridges), tuple(error / whole if whole > 0 else 0.0 for error in errors))
