"""Positive definite systems and packed symmetric matrices."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from corp.errors import SingularSystemError

# "lambda -> 0+" in floating point, relative: the first of these at which the system is positive definite. Sums of
# float64 products pass at the first; those of float32 products, rounded to about 1e-7, need more on singular systems.
VANISHING = (1e-10, 1e-8, 1e-6, 1e-4)
MAPPED_AT_ONCE = 512  # packed matrices unpacked at a time: 16 MB each way at d = 64


def mean_diagonal(A: Tensor) -> float:
    """Mean of the diagonal of A (D, D): the scale that makes a ridge relative."""
    return float(A.diagonal().mean()) if len(A) else 0.0


def solve_ridge(A: Tensor, rhs: Tensor, lam: float) -> Tensor:
    """X with (A + lam I) X = rhs, for A (D, D) symmetric positive semidefinite and rhs (D, K)."""
    damped = A + lam * torch.eye(len(A), dtype=A.dtype, device=A.device)
    L, info = torch.linalg.cholesky_ex(damped)
    if info.item() != 0 or not bool(torch.isfinite(L).all()):
        raise SingularSystemError(
            f"the system of {len(A)} kept dimensions is not positive definite at lambda={lam:g}; "
            "raise the ridge or calibrate on more samples"
        )
    return torch.cholesky_solve(rhs, L)  # never form the inverse


def solve_vanishing(A: Tensor, rhs: Tensor, scale: float) -> Tensor:
    """solve_ridge in the limit lambda -> 0+, for the optimum J*; `scale` makes the limit relative."""
    for relative in VANISHING[:-1]:
        try:
            return solve_ridge(A, rhs, relative * scale)
        except SingularSystemError:
            continue
    return solve_ridge(A, rhs, VANISHING[-1] * scale)


@lru_cache(maxsize=64)
def _triangle(d: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(d, d)
    return rows, columns


def packed_size(d: int) -> int:
    return d * (d + 1) // 2


def packed_index(d: int) -> Tensor:
    """(d, d) -> position of the entry (i, j) of a symmetric matrix in its packed upper triangle."""
    rows, columns = _triangle(d)
    index = torch.empty(d, d, dtype=torch.long)
    index[rows, columns] = torch.arange(len(rows))
    index[columns, rows] = torch.arange(len(rows))
    return index


def pack(A: Tensor) -> Tensor:
    """Upper triangle of symmetric matrices: (..., d, d) -> (..., d(d+1)/2)."""
    rows, columns = _triangle(A.shape[-1])
    return A[..., rows, columns]


def unpack(p: Tensor, d: int) -> Tensor:
    """The inverse of `pack`: (..., d(d+1)/2) -> (..., d, d)."""
    return p[..., packed_index(d)]


def map_packed(p: Tensor, d: int, M: Tensor) -> Tensor:
    """M S M^T of packed symmetric matrices S: (N, d(d+1)/2) and M (r, d) -> (N, r(r+1)/2)."""
    parts = []
    for part in p.split(MAPPED_AT_ONCE):
        left = M @ unpack(part, d)  # (n, r, d)
        parts.append(pack(left @ M.mT))
    return torch.cat(parts)
