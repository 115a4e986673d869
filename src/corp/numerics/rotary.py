"""Logit compensation under rotary positions: one complex number per kept frequency.

A rotation turns the pair (q_j, q_{j+p}) of every frequency j < p = d/2, as one complex number, by an angle that depends
on the position. After it the logit is sum_j Re z_j with z_j = q_j conj(k_j). A map of the pairs survives only if it
commutes with every rotation: multiplication by c_j. So of the dropped frequencies P the kept ones S can say

    sum_P Re z_j  ~  sum_S (a_j x_j + b_j y_j),        x_j = Re z_j,  y_j = Im z_j,        c_j = 1 + a_j - i b_j,

a linear regression in 2|S| unknowns. Its normal equations are blocks of A (2p, 2p), the second moments of the features
(x_1 … x_p, y_1 … y_p) over all logits, which follow from the Grams of the rotated queries and keys of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.affine import Distortion
from corp.numerics.linalg import mean_diagonal, solve_ridge, solve_vanishing

TINY = 1e-9  # relative ridge while eliminating: costs are those of the unregularised optimum


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., n, d) with its pairs (j, j + d/2) turned by the angles whose cosines and sines are given, (..., n, d)."""
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
    """E[x_j^2] summed over logits (p,): what a pair alone contributes, the paper's ranking of dimensions."""
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
        A[features[:, None], features],
        A[features[:, None], pruned].sum(1),
        float(A[pruned[:, None], pruned].sum()),
    )


def fit_pairs(system: PairSystem, *, ridge: float) -> Tensor:
    """(a, b) stacked (2S,) with (A + lambda I) (a, b) = h, lambda = ridge * mean diagonal of A."""
    return solve_ridge(system.A, system.h[:, None], ridge * mean_diagonal(system.A))[:, 0]


def error(system: PairSystem, ab: Tensor) -> float:
    """The summed squared error of the logits, exactly, for any (a, b)."""
    return max(0.0, float(system.T - 2 * ab @ system.h + ab @ (system.A @ ab)))


def distortion(system: PairSystem, ab: Tensor) -> Distortion:
    """What (a, b) costs, beside the best and none; rho^2 = 1 - J* / J_uncomp."""
    best = solve_vanishing(system.A, system.h[:, None], mean_diagonal(system.A))[:, 0]
    J_star = error(system, best)
    rho2 = min(1.0, max(0.0, 1 - J_star / system.T)) if system.T > 0 else 1.0
    return Distortion(J=error(system, ab), J_star=J_star, J_uncomp=system.T, rho2=rho2)


def eliminate(moments: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(kept, pruned) pairs, ascending: pairs go one by one, each time the one whose loss costs least after refitting.

    moments (R, 2p, 2p): A of every query head that shares these keys; they lose the same pairs. With the total logit
    t = sum x_j regressed on the pairs left, w = (A_SS)^-1 A_St, dropping pair j adds w_j^T [(A_SS)^-1_jj]^-1 w_j
    to the squared error (block inversion); what is left of w and the inverse follows by a rank-two downdate.
    """
    R, n, _ = moments.shape
    p = n // 2
    scale = moments.diagonal(dim1=-2, dim2=-1).mean(-1)  # (R,)
    damped = moments + TINY * scale[:, None, None] * torch.eye(n, dtype=moments.dtype, device=moments.device)
    inverse = torch.linalg.inv(damped)  # (R, 2p, 2p)
    w = torch.cat([torch.ones(p), torch.zeros(p)]).to(moments).expand(R, n).clone()  # t is the sum of all x
    left = torch.arange(p)
    for _ in range(p - keep):
        pair = torch.stack([left, left + p], -1)  # (s, 2)
        blocks = inverse[:, pair[:, :, None], pair[:, None, :]]  # (R, s, 2, 2)
        wj = w[:, pair]  # (R, s, 2)
        cost = (wj * torch.linalg.solve(blocks, wj)).sum((0, 2))  # (s,)
        worst = int(cost.argmin())
        gone = pair[worst]
        column = inverse[:, :, gone]  # (R, 2p, 2)
        solved = torch.linalg.solve(blocks[:, worst], column.mT).mT  # column [(.)_jj]^-1
        w = w - (solved @ wj[:, worst, :, None])[..., 0]
        inverse = inverse - solved @ column.mT
        left = torch.cat([left[:worst], left[worst + 1 :]])
    pruned = torch.ones(p, dtype=torch.bool)
    pruned[left] = False
    return left, pruned.nonzero().squeeze(1)


def pair_map(kept: Tensor, width: int, ab: Tensor | None = None) -> Tensor:
    """(2S, d): what turns a head's dense rows into those of the kept pairs, first halves then second, times c.

    c = 1 + a - i b, so that Re(c z) = (1 + a) x + b y; without (a, b) the rows are as they were.
    """
    rows = torch.eye(width, dtype=torch.float64 if ab is None else ab.dtype)[torch.cat([kept, kept + width // 2])]
    if ab is None:
        return rows
    re, im = torch.diag(1 + ab[: len(kept)]), torch.diag(-ab[len(kept) :])
    return torch.cat([torch.cat([re, -im], 1), torch.cat([im, re], 1)]) @ rows
