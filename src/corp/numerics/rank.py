"""Which channels and dimensions to keep (paper: section 3.3, Algorithms 2 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def weight_magnitude(W: Tensor) -> Tensor:
    """||W_:,i||_2 of every column of W (o, D)."""
    return W.square().sum(0).sqrt()


def mlp_scores(rank: str, energy: Tensor, variance: Tensor, active: Tensor, W: Tensor) -> Tensor:
    """(D,) importance of the hidden channels, from E[x_i^2], Var x_i and P(|x_i| > eps), each (D,), and W (o, D)."""
    if rank == "combined":  # the paper's default
        return energy * weight_magnitude(W)
    if rank == "activation":
        return energy
    if rank == "magnitude":
        return weight_magnitude(W)
    if rank == "active":
        return active
    if rank == "wanda":
        return energy.sqrt() * weight_magnitude(W)
    if rank == "variance":
        return variance
    if rank == "fluctuation":
        return variance * weight_magnitude(W).square()
    raise ValueError(f"no ranking is called {rank!r}")


def top(scores: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(kept, pruned): the `keep` highest scores and the rest, both ascending; ties keep the lower index."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:keep].sort().values, order[keep:].sort().values


def strongest(energies: Sequence[Tensor], keep: int) -> tuple[Tensor, Tensor]:
    """(kept, pruned) dimensions of query heads that share their keys, by the sum of their energies E (d, d)."""
    return top(torch.stack([E.diagonal() for E in energies]).sum(0), keep)
