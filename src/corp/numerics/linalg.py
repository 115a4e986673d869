"""Positive definite systems and packed symmetric matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.place import Place

Found = TypeVar("Found")

# "lambda -> 0+" in floating point, relative: the first of these at which the system is positive definite. Sums of
# float64 products pass at the first; those of float32 products, rounded to about 1e-7, need more on singular systems,
# most if a head is mapped by a basis from a handful of tokens. The last are for systems of pure rounding errors.
VANISHING = (1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
COLUMNS = 512  # of a symmetric matrix that are multiplied at a time: narrower blocks cost more time than they save
RAISED = 8  # the most powers of ten by which a ridge is raised
REFINEMENTS, LEFT = 3, 1e-6  # steps, and the largest residual relative to the right-hand side
MAPPED_AT_ONCE = 512  # packed matrices unpacked at a time: 16 MB each way at d = 64


def mean_diagonal(A: Tensor) -> float:
    """Mean of the diagonal of A (D, D): the scale that makes a ridge relative."""
    return float(A.diagonal().mean()) if len(A) else 0.0


def energy_in(A: Tensor, S: Tensor) -> float:
    """tr A S A^T = E||A x||^2, for A (o, D) and symmetric S (D, D) = E[x x^T].

    Blocks right of the diagonal are those below it, so half of the product is enough.
    """
    total = A.new_zeros(())
    for start in range(0, len(S), COLUMNS):
        stop = min(start + COLUMNS, len(S))
        here, own = A[:, start:stop], S[start:stop, start:stop]
        # (o, COLUMNS)
        product = torch.addmm(here @ own, A[:, stop:], S[stop:, start:stop], alpha=2) if stop < len(S) else here @ own
        total += (product * here).sum()
    return float(total)


def dead(A: Tensor) -> Tensor:
    """Which dimensions (D,) of A (D, D), symmetric positive semidefinite, have no variance up to rounding."""
    diagonal = A.diagonal()
    return diagonal.abs() <= torch.finfo(A.dtype).eps * diagonal.abs().amax() if len(A) else diagonal.bool()


def damped(A: Tensor, lam: float) -> Tensor:
    """A + lam I (D, D), with 1 on the diagonal where A has no variance, so that the solution there is 0 / 1."""
    regular = A.clone()
    regular.diagonal().copy_(torch.where(dead(A), 1.0, A.diagonal() + lam))
    return regular


def cholesky(A: Tensor) -> Tensor | None:
    """The lower Cholesky factor of A (D, D); None if A is not positive definite."""
    L, info = torch.linalg.cholesky_ex(A)
    return L if info.item() == 0 and bool(torch.isfinite(L.diagonal()).all()) else None


def solve_ridge(A: Tensor, rhs: Tensor, lam: float) -> Tensor:
    """X with (A + lam I) X = rhs, for A (D, D) symmetric positive semidefinite and rhs (D, K).

    A dimension without variance predicts nothing: its row of X is 0, whatever lam is. In float32 the solution is
    refined, and its residual must be negligible.
    """
    regular, L = _factorised(A, lam)
    rhs = rhs.masked_fill(dead(A)[:, None], 0.0)
    X = torch.cholesky_solve(rhs, L)  # never form the inverse
    return X if A.dtype == torch.float64 else _refined(regular, rhs, X, L)


def _factorised(A: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """A + lam I, and its Cholesky factor."""
    regular = damped(A, lam)
    L = cholesky(regular)
    if L is None:
        raise SingularSystemError(
            f"the system of {len(A)} kept dimensions is not positive definite at lambda={lam:g}; "
            "raise the ridge or calibrate on more samples"
        )
    return regular, L


def solve_raised(A: Tensor, rhs: Tensor, lam: float) -> Tensor:
    """solve_ridge at lam, raised by powers of ten until the rounded system can be solved."""
    for power in range(RAISED):
        try:
            return solve_ridge(A, rhs, lam * 10**power)
        except SingularSystemError:
            continue
    return solve_ridge(A, rhs, lam * 10**RAISED)


def _refined(A: Tensor, rhs: Tensor, X: Tensor, L: Tensor) -> Tensor:
    """X with A X = rhs from an approximation in float32: residuals in float64, corrections by the factor L.

    If they do not converge, the system is solved in float64.
    """
    place = Place.exactly(A.device)
    exact, wanted, found = (x.to(*place) for x in (A, rhs, X))
    for _ in range(REFINEMENTS):
        residual = wanted - exact @ found
        if bool(torch.linalg.vector_norm(residual) <= LEFT * torch.linalg.vector_norm(wanted)):
            return found.to(X)
        found = found + torch.cholesky_solve(residual.to(X), L).to(found)
    return torch.cholesky_solve(wanted, torch.linalg.cholesky(exact)).to(X)


def solve_vanishing(A: Tensor, rhs: Tensor, scale: float) -> Tensor:
    """solve_ridge in the limit lambda -> 0+, for the optimum J*; `scale` makes the limit relative."""
    return _at_vanishing(lambda lam: solve_ridge(A, rhs, lam), scale)


def explained_at_best(A: Tensor, rhs: Tensor, scale: float) -> float:
    """tr rhs^T (A + lam I)^-1 rhs = ||L^-1 rhs||^2 in the same limit: what the optimum explains, half of a solve."""

    def explained(lam: float) -> float:
        if A.dtype != torch.float64:  # a solution in float32 is refined
            return float((solve_ridge(A, rhs, lam) * rhs).sum())
        _, L = _factorised(A, lam)
        alive = rhs.masked_fill(dead(A)[:, None], 0.0)
        return float(torch.linalg.solve_triangular(L, alive, upper=False).square().sum())

    return _at_vanishing(explained, scale)


def _at_vanishing(work: Callable[[float], Found], scale: float) -> Found:
    """The work at the least lambda at which the system can be factorised."""
    for relative in VANISHING[:-1]:
        try:
            return work(relative * scale)
        except SingularSystemError:
            continue
    return work(VANISHING[-1] * scale)


@lru_cache(maxsize=64)
def triangle(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and columns (t,) of a symmetric matrix (d, d) in the order in which it is packed."""
    rows, columns = torch.triu_indices(d, d, device=device)
    return rows, columns


def packed_size(d: int) -> int:
    """d(d+1)/2: the length of a packed symmetric matrix (d, d)."""
    return d * (d + 1) // 2


@lru_cache(maxsize=64)
def packed_index(d: int, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008  (immutable)
    """(d, d) -> position of the entry (i, j) of a symmetric matrix in its packed upper triangle."""
    rows, columns = triangle(d, device)
    index = torch.empty(d, d, dtype=torch.long, device=device)
    index[rows, columns] = index[columns, rows] = torch.arange(len(rows), device=device)
    return index


def pack(A: Tensor) -> Tensor:
    """Upper triangle of symmetric matrices: (..., d, d) -> (..., d(d+1)/2)."""
    d = A.shape[-1]
    rows, columns = triangle(d, A.device)
    if A.dim() == 2:  # one matrix may be large, and another index would take more memory than it
        return A[rows, columns]
    index = (rows * d + columns).expand(*A.shape[:-2], -1)
    return A.flatten(-2).gather(-1, index)  # six times as fast for many small ones


def unpack(p: Tensor, d: int) -> Tensor:
    """The inverse of `pack`: (..., d(d+1)/2) -> (..., d, d)."""
    return p[..., packed_index(d, p.device)]


def unpack_upper(p: Tensor, d: int) -> Tensor:
    """The upper triangle of a packed symmetric matrix, (d(d+1)/2,) -> (d, d), without an index as large."""
    A = p.new_zeros(d, d)
    for row, entries in enumerate(p.split([*range(d, 0, -1)])):
        A[row, row:] = entries
    return A


def packed_outer(x: Tensor) -> Tensor:
    """x x^T, packed: (..., d) -> (..., d(d+1)/2)."""
    rows, columns = triangle(x.shape[-1], x.device)
    return x[..., rows] * x[..., columns]


def map_packed(p: Tensor, d: int, M: Tensor) -> Tensor:
    """M S M^T of packed symmetric matrices S, one column each: (d(d+1)/2, N) and M (r, d) -> (r(r+1)/2, N)."""
    index, (rows, columns) = packed_index(d, p.device), triangle(len(M), p.device)
    parts = []
    for part in p.split(MAPPED_AT_ONCE, 1):
        half = M @ part[index]  # (d, r, n): S M^T
        parts.append((M @ half.reshape(d, -1)).view(len(M), len(M), -1)[rows, columns])
    return torch.cat(parts, 1)
