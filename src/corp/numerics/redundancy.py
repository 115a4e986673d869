"""How redundant a set of channels is (paper: appendix A), from their covariance or Gram matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Redundancy(NamedTuple):
    """Measures of one matrix of second moments over `dim` channels."""

    dim: int
    effective_rank: float
    k95_channels: int
    k95_eigenvalues: int


def redundancy(Sigma: Tensor) -> Redundancy:
    """All measures of Sigma (D, D), symmetric positive semidefinite up to rounding."""
    eigenvalues = torch.linalg.eigvalsh(Sigma).clamp(min=0)  # (D,); rounding can make zeros negative
    return Redundancy(len(Sigma), effective_rank(eigenvalues), k_share(Sigma.diagonal()), k_share(eigenvalues))


def effective_rank(eigenvalues: Tensor) -> float:
    """exp of the entropy of p_i = lambda_i / sum lambda: D for equal eigenvalues, 1 for a single one, 0 for none."""
    total = eigenvalues.sum()
    if not total > 0:
        return 0.0
    p = eigenvalues / total  # (D,)
    return float(torch.special.entr(p).sum().exp())


def k_share(values: Tensor, share: float = 0.95) -> int:
    """The smallest number of `values` (D,), largest first, that hold `share` of their sum; 0 if the sum is 0."""
    ordered = values.sort(descending=True).values.cumsum(0)  # (D,)
    if len(ordered) == 0 or not ordered[-1] > 0:
        return 0
    enough = share * ordered[-1] * (1 - 1e-12)  # rounding must not miss a share that is met exactly
    return int((ordered < enough).sum()) + 1


def inactivity(active_share: Tensor) -> float:
    """Activation sparsity: 1 - P(|x| > eps), averaged over channels (D,)."""
    return 1.0 - float(active_share.mean())
