"""Logit-space compensation of pruned Q/K dimensions (paper: section 3.4, Algorithm 5, Propositions C.2.1 and C.2.2).

Per head, with per-sample Grams g_q = Q^T Q and g_k = K^T K (d, d), everything follows from sums over samples b. The
paper's G = sum_b (g_k)_SS (x) (g_q)_SS is never formed: it is the operator

    G: M -> sum_b (g_q)_SS M (g_k)_SS        h = sum_b (g_q)_SP (g_k)_PS        T = sum_b <(g_q)_PP, (g_k)_PP>
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics import kronecker
from corp.numerics.affine import Distortion, explained
from corp.numerics.kronecker import Operator

PRECISE_BELOW = 1e-6  # a smaller ridge requests a fit that is exact where an exact fit exists


class LogitSystem(NamedTuple):
    """Normal equations of min_M sum_b ||Q_P K_P^T - Q_S M K_S^T||^2."""

    G: Operator  # of M (S, S)
    h: Tensor  # (S, S)
    T: float  # sum_b ||Q_P K_P^T||^2 = J_uncomp
    scale: float  # mean diagonal of G


def logit_system(G: Operator, h: Tensor, E: Tensor, pruned: Tensor) -> LogitSystem:
    """Assemble the system of one head: G and h (S, S) of its kept dimensions, E (d, d) = sum_b g_q * g_k."""
    return LogitSystem(G, h, float(E[pruned[:, None], pruned].sum()), kronecker.mean_diagonal(G))


def fit_logit(system: LogitSystem, *, ridge: float, tolerance: float | None = None) -> Tensor:
    """M (S, S) with G(M) + lambda M = h, lambda = ridge * mean diagonal of G.

    The tolerance applies from a ridge of PRECISE_BELOW on; with a smaller one the solution is as precise as its dtype.
    """
    if ridge < PRECISE_BELOW:
        tolerance = None
    return kronecker.solve(system.G, system.h, ridge * system.scale, tolerance)


def best_logit(system: LogitSystem) -> Tensor:
    """The unregularised optimum: fit_logit as the ridge vanishes."""
    return kronecker.solve_vanishing(system.G, system.h, system.scale)


def error(system: LogitSystem, M: Tensor) -> float:
    """sum_b ||Q_P K_P^T - Q_S M K_S^T||^2 = T - 2 <M, h> + <M, G(M)>, exactly, for any M (Proposition C.2.1)."""
    return max(0.0, float(system.T - 2 * (M * system.h).sum() + (M * system.G.apply(M)).sum()))


def distortion(system: LogitSystem, M: Tensor) -> Distortion:
    """The error with M, with the best M, and without compensation; rho^2 = 1 - J* / J_uncomp (Proposition C.2.2)."""
    J_star = error(system, best_logit(system))
    return Distortion(J=error(system, M), J_star=J_star, J_uncomp=system.T, rho2=explained(J_star, system.T))


def fold_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """A, B (S, S) with A B^T = I + M: U Sigma^1/2 for the queries, V Sigma^1/2 for the keys."""
    U, sigma, Vh = torch.linalg.svd(torch.eye(len(M), dtype=M.dtype, device=M.device) + M)
    root = sigma.sqrt()
    return U * root, Vh.mT * root


def query_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """fold_factors with everything on the queries, because keys that several query heads share must not change."""
    identity = torch.eye(len(M), dtype=M.dtype, device=M.device)
    return identity + M, identity


def head_map(kept: Tensor, width: int, factor: Tensor) -> Tensor:
    """The map (S, d) that selects the kept rows of a head and multiplies them by factor^T (S, S).

    It applies to the weight and to the bias: the paper folds only the weights, but q = x W + b.
    """
    return factor.new_zeros(len(kept), width).index_copy_(1, kept.to(factor.device), factor.mT)
