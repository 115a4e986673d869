"""Logit-space compensation of pruned Q/K dimensions (paper: section 3.4, Algorithm 5, Propositions C.2.1 and C.2.2).

Per head, with per-sample Grams g_q = Q^T Q and g_k = K^T K (d, d), everything follows from sums over samples b:

    G = sum_b (g_k)_SS (x) (g_q)_SS        h = vec sum_b (g_q)_SP (g_k)_PS        T = sum_b <(g_q)_PP, (g_k)_PP>
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.affine import Distortion
from corp.numerics.linalg import mean_diagonal, packed_index, solve_ridge, solve_vanishing


class LogitSystem(NamedTuple):
    """Normal equations of min_M sum_b ||Q_P K_P^T - Q_S M K_S^T||^2, vec stacking columns."""

    G: Tensor  # (S*S, S*S)
    h: Tensor  # (S*S,)
    T: float  # sum_b ||Q_P K_P^T||^2 = J_uncomp


def logit_system(kron_SS: Tensor, H: Tensor, E: Tensor, kept: Tensor, pruned: Tensor) -> LogitSystem:
    """Assemble G, h and T for one head and one choice of kept dimensions.

    kron_SS (t, t), t = S(S+1)/2: sum_b vech(g_k,SS) vech(g_q,SS)^T, the packed G
    H (d, d) = sum_b g_q g_k        E (d, d) = sum_b g_q * g_k (elementwise)

    h needs no third sum: Q_P K_P^T = Q K^T - Q_S K_S^T, so h = vec(H_SS) - G vec(I).
    """
    S = len(kept)
    index = packed_index(S)
    G = kron_SS[index][:, :, index]  # (j, j', i, i'): g_k[j, j'] g_q[i, i']
    G = G.permute(0, 2, 1, 3).reshape(S * S, S * S)
    identity = torch.eye(S, dtype=G.dtype, device=G.device).reshape(-1)
    h = H[kept[:, None], kept].mT.reshape(-1) - G @ identity
    return LogitSystem(G, h, float(E[pruned[:, None], pruned].sum()))


def fit_logit(system: LogitSystem, *, ridge: float) -> Tensor:
    """M (S, S) with (G + lambda I) vec(M) = h, lambda = ridge * mean diagonal of G."""
    return _matrix(solve_ridge(system.G, system.h[:, None], ridge * mean_diagonal(system.G)))


def best_logit(system: LogitSystem) -> Tensor:
    """The unregularised optimum: fit_logit as the ridge vanishes."""
    return _matrix(solve_vanishing(system.G, system.h[:, None], mean_diagonal(system.G)))


def _matrix(vec: Tensor) -> Tensor:
    """vec(M) (S*S, 1) -> M (S, S); vec stacks columns."""
    S = round(len(vec) ** 0.5)
    return vec.reshape(S, S).mT


def error(system: LogitSystem, M: Tensor) -> float:
    """sum_b ||Q_P K_P^T - Q_S M K_S^T||^2, exactly, for any M (Proposition C.2.1)."""
    m = M.mT.reshape(-1)
    return max(0.0, float(system.T - 2 * m @ system.h + m @ (system.G @ m)))


def distortion(system: LogitSystem, M: Tensor) -> Distortion:
    """What M costs, beside the best M and none; rho^2 = 1 - J* / J_uncomp (Proposition C.2.2)."""
    best = best_logit(system)
    J_star = error(system, best)
    rho2 = min(1.0, max(0.0, 1 - J_star / system.T)) if system.T > 0 else 1.0
    return Distortion(J=error(system, M), J_star=J_star, J_uncomp=system.T, rho2=rho2)


def fold_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """A, B (S, S) with A B^T = I + M: U Sigma^1/2 for the queries, V Sigma^1/2 for the keys."""
    U, sigma, Vh = torch.linalg.svd(torch.eye(len(M), dtype=M.dtype, device=M.device) + M)
    root = sigma.sqrt()
    return U * root, Vh.mT * root


def query_factors(M: Tensor) -> tuple[Tensor, Tensor]:
    """The same with all of it on the queries: keys that several query heads share must stay as they are."""
    identity = torch.eye(len(M), dtype=M.dtype, device=M.device)
    return identity + M, identity


def head_map(kept: Tensor, width: int, factor: Tensor | None = None) -> Tensor:
    """(S, d): what turns a head's dense rows into its kept ones, mixed by `factor` (S, S) if given.

    It applies to the weight and to the bias: the paper folds the weights only, but q = x W + b.
    """
    rows = torch.eye(width, dtype=torch.float64 if factor is None else factor.dtype)[kept]
    return rows if factor is None else factor.mT @ rows
