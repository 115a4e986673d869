"""The length that QK-norm divides a head by, predicted from the kept dimensions.

The norm divides q (d,) by sqrt(s), s = mean(q^2) + eps, to which every dimension contributes. From the kept ones S

    s'  =  sum_S v_j q_j^2 / d  +  c,        v_j >= 1,  c >= eps,

is fitted to s such that the mean of (s' / s - 1)^2, the relative error, is least. With the features
f = (q_1^2 / (d s) … q_d^2 / (d s), 1 / s) and u = (1 … 1, eps), the dense norm is u.f = 1 for every token. A prediction
w = (v, c), zero at pruned dimensions, has the error (w - u).f, whose mean square is a quadratic form in F, the second
moments of f, and the fit is a least-squares problem in blocks of F. The bounds keep s' from falling below the
contribution of the kept dimensions: no kept part of a head becomes longer than a whole dense head can be.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.linalg import mean_diagonal, solve_vanishing


class Length(NamedTuple):
    """The prediction s' = sum_S v_j q_j^2 / d + c of one head."""

    v: Tensor  # (S,)
    c: Tensor  # ()


def length_features(x: Tensor, eps: float) -> Tensor:
    """f (..., d + 1) of heads x (..., d) before their norm, in float32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    s = x.square().mean(-1, keepdim=True) + eps
    return torch.cat([x.square() / (x.shape[-1] * s), 1 / s], -1)


def fit_length(F: Tensor, kept: Tensor, eps: float, *, ridge: float) -> Length:
    """The best v >= 1 and c >= eps, with a ridge towards equal v; F (d + 1, d + 1) are sums over tokens.

    Numbers that fall below their bound are set to it, and the others are solved for again.
    """
    d, m = len(F) - 1, len(kept)
    used = torch.cat([kept, kept.new_tensor([d])])
    A = F[used[:, None], used]  # (S + 1, S + 1)
    h = F[used] @ _pruned_part(F, kept)
    scale = torch.ones_like(h)
    level = mean_diagonal(A[:m, :m])
    scale[m] = (level / A[m, m]).sqrt() if level > 0 else 1.0  # 1 / s has another unit
    A, h = A * scale * scale[:, None], h * scale
    A[:m, :m] += ridge * level * (torch.eye(m, dtype=A.dtype, device=A.device) - 1 / m)
    free, w = torch.ones_like(h, dtype=torch.bool), torch.zeros_like(h)
    while bool(free.any()):
        i = free.nonzero()[:, 0]
        found = solve_vanishing(A[i[:, None], i], h[i, None], mean_diagonal(A))[:, 0]
        if bool((found >= 0).all()):
            w[i] = found
            break
        free[i[found < 0]] = False
    w = w * scale
    return Length(1 + w[:m], eps + w[m])


def square_error(F: Tensor, kept: Tensor, length: Length, eps: float) -> float:
    """The mean of (s' / s - 1)^2 over the tokens that F sums."""
    off = _pruned_part(F, kept)
    off[kept] = 1 - length.v.to(off)
    off[-1] = eps - length.c.to(off)
    one = torch.ones_like(off)
    one[-1] = eps
    tokens = float(one @ F @ one)  # u.f = 1 for every token
    return max(0.0, float(off @ F @ off)) / tokens if tokens > 0 else 0.0


def relative_error(square: float) -> float:
    """The relative error of the length itself, to first order: sqrt(s' / s) - 1 is half of s' / s - 1."""
    return 0.5 * math.sqrt(square)


def _pruned_part(F: Tensor, kept: Tensor) -> Tensor:
    """A vector (d + 1,) with 1 at pruned dimensions."""
    part = torch.ones_like(F[0])
    part[kept] = 0
    part[-1] = 0
    return part
