"""The best r-dimensional form of a head's logits: maps of queries and keys instead of a choice of dimensions.

With q' = A q and k' = B k, A and B (r, d), the logits q^T k become q^T A^T B k. Per sample b, with g_q = Q^T Q and
g_k = K^T K, the squared error is

    J(A, B) = sum_b ||Q Z K^T||^2 = <Z, sum_b g_q Z g_k>        Z = I - A^T B.

Softmax ignores constants along a row of logits, so the keys should be centred within their sample; the formulas stay
the same. If sum_b g_k (x) g_q were one product C_K (x) C_Q, the optimum would be the r leading singular vectors of
C_Q^1/2 C_K^1/2. From there, exact steps alternate: given B the best A solves

    sum_b (B g_k B^T) A g_q = B sum_b g_k g_q,

linear in r d unknowns (see kronecker), and likewise for the best B given A. Query heads that share their keys share B;
each has its own A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.affine import Distortion, explained
from corp.numerics.kronecker import Operator, Total, mean_diagonal, solve, solve_vanishing

RAISED = 3  # ridges that a step tries, each a hundred times the one before
FLOOR = 1e-12  # relative; a smaller variance of keys in a direction counts as zero


class LogitSums(Protocol):
    """The sums of one query head and its keys; calibration.head_grams has two implementations."""

    def energy(self) -> Tensor:
        """E (d, d) = sum_b g_q * g_k."""

    def normal(self, A: Tensor | None = None, B: Tensor | None = None) -> Operator:
        """X -> sum_b (A g_q A^T) X (B g_k B^T); a map of None is the identity."""

    def single(self) -> LogitSums:
        """These sums in float32."""


class Subspace(NamedTuple):
    """q' = A q for each of the R query heads that share k' = B k."""

    A: Tensor  # (R, r, d)
    B: Tensor  # (r, d)
    ridge: float = 0.0  # the largest of the steps that gave the maps; larger than requested if a step needed it


def nested(heads: Sequence[LogitSums]) -> Subspace:
    """Maps (d, d) whose first r rows are the best subspace for every r, if the sums were one product C_K (x) C_Q.

    With V the eigenvectors of C_K^1/2 C_Q C_K^1/2, C_Q summed over the heads: A = V^T C_K^1/2, B = V^T C_K^-1/2.
    """
    C_Q, C_K = Total([head.normal() for head in heads]).factors()
    values, basis = torch.linalg.eigh(C_K)
    root = values.clamp(min=FLOOR * float(values[-1]) if values[-1] > 0 else 1.0).sqrt()  # (d,)
    half = (basis * root).mT  # (d, d), half^T half = C_K
    V = torch.linalg.eigh(half @ C_Q @ half.mT).eigenvectors.flip(1)  # largest first
    A, B = V.mT @ half, V.mT @ (basis / root).mT
    return Subspace(A.expand(len(heads), *A.shape), B)


def leading(whole: Subspace, keep: int) -> Subspace:
    """The first `keep` dimensions of nested maps."""
    return balanced(Subspace(whole.A[:, :keep], whole.B[:keep]))


def fit_subspace(
    heads: Sequence[LogitSums], keep: int, *, ridge: float, sweeps: int = 1, tolerance: float | None = None
) -> Subspace:
    """`keep` dimensions for query heads that share their keys: the nested start, then steps that never increase J.

    A sweep is a step of the keys and one of the queries. The ridge is relative, as in fit_logit, and pulls towards the
    start of the step: directions without data do not change. With a `tolerance` for the steps, only the residual is
    computed in float64, and the step itself in float32.
    """
    whole = nested(heads)
    A, B = whole.A[:, :keep], whole.B[:keep]
    ridges = [ridge]

    def step(normal: Operator, residual: Tensor) -> Tensor:
        change, used = _step(normal, residual, ridge, tolerance)
        ridges.append(used)
        return change

    rough = [head.single() for head in heads] if tolerance and ridge > 0 and sweeps else heads
    for _ in range(sweeps):
        # Keys: sum_b (A g_q A^T) dB g_k = A left, over all heads. Queries: sum_b g_q dA^T (B g_k B^T) = left B^T.
        keys = Total([head.normal(A=a) for head, a in zip(rough, A, strict=True)])
        gains = [a @ left_over(head, a, B) for head, a in zip(heads, A, strict=True)]
        B = B + step(keys, torch.stack(gains).sum(0))
        A = torch.stack(
            [
                a + step(thin.normal(B=B), left_over(head, a, B) @ B.mT).mT
                for head, thin, a in zip(heads, rough, A, strict=True)
            ]
        )
    return balanced(Subspace(A, B, max(ridges)))


def left_over(head: LogitSums, A: Tensor, B: Tensor) -> Tensor:
    """sum_b g_q (I - A^T B) g_k (d, d)."""
    return head.normal().apply(_left(A, B))


def _left(A: Tensor, B: Tensor) -> Tensor:
    return torch.eye(A.shape[1], dtype=A.dtype, device=A.device) - A.mT @ B


def _step(normal: Operator, residual: Tensor, ridge: float, tolerance: float | None) -> tuple[Tensor, float]:
    """X with normal(X) = residual and the ridge towards 0, which is raised if only rounding errors vary.

    X is 0 if the largest ridge is not enough either.
    """
    scale = mean_diagonal(normal)
    if scale <= 0:
        return torch.zeros_like(residual), ridge
    if ridge == 0:
        return solve_vanishing(normal, residual, scale), ridge
    for power in range(RAISED):
        try:
            return solve(normal, residual, ridge * scale * 100**power, tolerance), ridge * 100**power
        except SingularSystemError:
            continue
    return torch.zeros_like(residual), ridge * 100 ** (RAISED - 1)


def balanced(fit: Subspace) -> Subspace:
    """Maps with the same products A^T B, and A and B of equal size, which lower precision rounds least."""
    R, r, d = fit.A.shape
    Q, tall = torch.linalg.qr(fit.A.transpose(1, 2).reshape(R * d, r))  # A^T, stacked
    P, wide = torch.linalg.qr(fit.B.mT)
    U, sigma, Vh = torch.linalg.svd(tall @ wide.mT)  # A^T B = Q U sigma Vh P^T
    root = sigma.sqrt()
    return Subspace((Q @ (U * root)).reshape(R, d, r).transpose(1, 2), (P @ (Vh.mT * root)).mT, fit.ridge)


def error(head: LogitSums, A: Tensor, B: Tensor) -> float:
    """J(A, B) of one query head, exactly, for any maps."""
    return max(0.0, float((_left(A, B) * left_over(head, A, B)).sum()))


def distortion(head: LogitSums, A: Tensor, B: Tensor, pruned: Tensor) -> Distortion:
    """The error of the maps of one query head, compared with coordinates.

    J_uncomp is the error if the dimensions `pruned` were removed without compensation. No better maps than these are
    known, so J* is J.
    """
    J, J_uncomp = error(head, A, B), dropped(head, pruned)
    return Distortion(J, J, J_uncomp, explained(J, J_uncomp))


def dropped(head: LogitSums, pruned: Tensor) -> float:
    """The error of a head without these dimensions and without compensation."""
    return float(head.energy()[pruned[:, None], pruned].sum())
