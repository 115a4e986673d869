"""Logit compensation under rotary positions: one complex number per kept frequency.

A rotation rotates the pair (q_j, q_{j+p}) of every frequency j < p = d/2, as one complex number, by an angle that
depends on the position. The logit is then sum_j Re z_j with z_j = q_j conj(k_j). A map of the pairs can be folded only
if it commutes with every rotation: multiplication by c_j. So the kept frequencies S predict the dropped ones P by

    sum_P Re z_j  ~  sum_S (a_j x_j + b_j y_j),        x_j = Re z_j,  y_j = Im z_j,        c_j = 1 + a_j - i b_j,

a linear regression in 2|S| unknowns. Its normal equations are blocks of A (2p, 2p), the second moments of the features
(x_1 … x_p, y_1 … y_p) over all logits, which follow from the Grams of the rotated queries and keys of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.affine import Distortion, explained
from corp.numerics.linalg import mean_diagonal, solve_ridge, solve_vanishing

TINY = 1e-9  # relative ridge of the elimination: costs are those of the unregularised optimum


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., n, d) with its pairs (j, j + d/2) rotated by the angles with these cosines and sines, (..., n, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def pair_moments(g_q: Tensor, g_k: Tensor) -> Tensor:
    """A (..., 2p, 2p) of one sample, from g_q = Q^T Q and g_k = K^T K (..., d, d), pairs as (j, j + p)."""
    (q11, q12), (q21, q22) = _quarters(g_q)
    (k11, k12), (k21, k22) = _quarters(g_k)
    xx = q11 * k11 + q12 * k12 + q21 * k21 + q22 * k22
    yy = q22 * k11 - q21 * k12 - q12 * k21 + q11 * k22
    xy = q12 * k11 - q11 * k12 + q22 * k21 - q21 * k22  # x_i y_j
    return torch.cat([torch.cat([xx, xy], -1), torch.cat([xy.mT, yy], -1)], -2)


def _quarters(g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    p = g.shape[-1] // 2
    return (g[..., :p, :p], g[..., :p, p:]), (g[..., p:, :p], g[..., p:, p:])


def pair_energy(A: Tensor) -> Tensor:
    """E[x_j^2] summed over logits (p,): the contribution of a pair alone, the paper's ranking of dimensions."""
    return A.diagonal()[: len(A) // 2]


def logit_energy(A: Tensor) -> float:
    """Sum of the squared logits."""
    p = len(A) // 2
    return float(A[:p, :p].sum())


class PairSystem(NamedTuple):
    """Normal equations of min_{a, b} sum (sum_P x_j - sum_S (a_j x_j + b_j y_j))^2."""

    A: Tensor  # (2S, 2S)
    h: Tensor  # (2S,)
    T: float  # sum (sum_P x_j)^2 = J_uncomp


def pair_system(A: Tensor, kept: Tensor, pruned: Tensor) -> PairSystem:
    """The blocks of A that belong to the kept and pruned pairs."""
    features = torch.cat([kept, kept + len(A) // 2])
    return PairSystem(
        A[features[:, None], features], A[features[:, None], pruned].sum(1), float(A[pruned[:, None], pruned].sum())
    )


def fit_pairs(system: PairSystem, *, ridge: float) -> Tensor:
    """(a, b) stacked (2S,) with (A + lambda I) (a, b) = h, lambda = ridge * mean diagonal of A."""
    return solve_ridge(system.A, system.h[:, None], ridge * mean_diagonal(system.A))[:, 0]


def error(system: PairSystem, ab: Tensor) -> float:
    """The summed squared error of the logits, exactly, for any (a, b)."""
    return max(0.0, float(system.T - 2 * ab @ system.h + ab @ (system.A @ ab)))


def distortion(system: PairSystem, ab: Tensor) -> Distortion:
    """The error with (a, b), with the best ones, and without compensation; rho^2 = 1 - J* / J_uncomp."""
    best = solve_vanishing(system.A, system.h[:, None], mean_diagonal(system.A))[:, 0]
    J_star = error(system, best)
    return Distortion(J=error(system, ab), J_star=J_star, J_uncomp=system.T, rho2=explained(J_star, system.T))


def eliminate(moments: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(kept, pruned) pairs, ascending: pairs are removed one by one, always the one that costs least after refitting.

    moments (..., R, 2p, 2p): A of the R query heads that share keys; they lose the same pairs. All groups of heads
    (...) are processed at once, and kept is (..., keep). With the total logit t = sum x_j regressed on the remaining
    pairs, w = (A_SS)^-1 A_St, dropping pair j adds w_j^T [(A_SS)^-1_jj]^-1 w_j to the squared error (block inversion);
    w and the inverse of the remaining pairs follow by a rank-two downdate.
    """
    *groups, R, n, _ = moments.shape
    A, p = moments.reshape(-1, R, n, n), n // 2
    inverse, w = _regression(A)
    alive = torch.ones(len(A), p, dtype=torch.bool, device=A.device)
    every = torch.arange(len(A), device=A.device)
    for _ in range(p - keep):
        j = torch.where(alive, _pair_costs(inverse, w), torch.inf).argmin(1)  # (G,)
        alive[every, j] = False
        gone = torch.stack([j, j + p], -1)  # (G, 2)
        column = inverse[every[:, None], :, :, gone].permute(0, 2, 3, 1)  # (G, R, 2p, 2)
        block = column[every[:, None], :, gone].transpose(1, 2)  # (G, R, 2, 2)
        solved = torch.linalg.solve(block, column.mT).mT  # column [(.)_jj]^-1
        w = w - (solved @ w[every[:, None], :, gone].mT[..., None])[..., 0]
        inverse = inverse - solved @ column.mT
    kept, pruned = (part.nonzero()[:, 1].view(*groups, -1) for part in (alive, ~alive))
    return kept, pruned


def _regression(A: Tensor) -> tuple[Tensor, Tensor]:
    """A^-1 (G, R, 2p, 2p) and w (G, R, 2p) with all pairs; a head without logits does not contribute to the cost."""
    p, scale = A.shape[-1] // 2, A.diagonal(dim1=-2, dim2=-1).mean(-1)  # (G, R)
    damped = A.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(torch.where(scale > 0, TINY * scale, 1.0)[..., None])
    w = torch.zeros_like(A[..., 0])
    w[..., :p] = (scale > 0)[..., None]  # t is the sum of all x
    return torch.linalg.inv(damped), w


def _pair_costs(inverse: Tensor, w: Tensor) -> Tensor:
    """The cost (G, p) of every pair, w_j^T [(A_SS)^-1_jj]^-1 w_j, summed over the heads of a group."""
    p = w.shape[-1] // 2
    (xx, xy), (_, yy) = _quarters(inverse)
    a, b, c = (part.diagonal(dim1=-2, dim2=-1) for part in (xx, xy, yy))  # (G, R, p)
    x, y = w[..., :p], w[..., p:]
    return ((c * x - 2 * b * y) * x + a * y * y).div(a * c - b * b).sum(1)


def pair_map(kept: Tensor, width: int, ab: Tensor | None = None) -> Tensor:
    """The map (2S, d) from a head's dense rows to those of the kept pairs, first halves then second, times c.

    c = 1 + a - i b, so that Re(c z) = (1 + a) x + b y; without (a, b) the rows are only selected, in float64.
    """
    ab = torch.zeros(2 * len(kept), dtype=torch.float64, device=kept.device) if ab is None else ab
    first, second = torch.eye(width, dtype=ab.dtype, device=ab.device)[torch.stack([kept, kept + width // 2])]
    re, b = 1 + ab[: len(kept), None], ab[len(kept) :, None]
    return torch.cat([re * first + b * second, re * second - b * first])
