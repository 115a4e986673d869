"""Which channels and dimensions to keep (paper: section 3.3, Algorithms 2 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_energy(mean: Tensor, cov: Tensor) -> Tensor:
    """E[x_i^2] from the mean (D,) and the covariance (D, D)."""
    return cov.diagonal() + mean.square()


def weight_magnitude(W: Tensor) -> Tensor:
    """||W_:,i||_2 of every column of W (o, D)."""
    return W.square().sum(0).sqrt()


def combined(mean: Tensor, cov: Tensor, W: Tensor) -> Tensor:
    """E[x_i^2] * ||W_:,i||_2, the paper's default."""
    return activation_energy(mean, cov) * weight_magnitude(W)


def mlp_scores(rank: str, mean: Tensor, cov: Tensor, active: Tensor, W: Tensor) -> Tensor:
    """(D,) importance of the hidden channels; `active` (D,) is P(|x_i| > eps)."""
    if rank == "combined":
        return combined(mean, cov, W)
    if rank == "activation":
        return activation_energy(mean, cov)
    if rank == "magnitude":
        return weight_magnitude(W)
    if rank == "active":
        return active
    if rank == "wanda":
        return activation_energy(mean, cov).clamp(min=0).sqrt() * weight_magnitude(W)
    if rank == "variance":
        return cov.diagonal()
    if rank == "fluctuation":
        return cov.diagonal() * weight_magnitude(W).square()
    raise ValueError(f"no ranking is called {rank!r}")


def top(scores: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(kept, pruned): the `keep` highest scores and the rest, both ascending; ties keep the lower index."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:keep].sort().values, order[keep:].sort().values
