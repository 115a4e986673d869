"""Sums of Kronecker products as operators, and their linear systems, solved without forming the matrix.

The normal equations of logits are X -> sum_b L_b X R_b with L_b (m, m) and R_b (n, n) symmetric positive semidefinite:
m n unknowns, whose matrix sum_b R_b (x) L_b would take (m n)^2 numbers. Conjugate gradients need the operator only. It
is close to one product C_L (x) C_R / tau, with C_L = sum_b tr(R_b) L_b, C_R = sum_b tr(L_b) R_b and tau the trace of
either, whose eigenbases therefore precondition well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.linalg import VANISHING, packed_index, unpack

ENTRIES_AT_ONCE = 256  # entries unpacked at a time: 16 MB each at d = 64
GOOD = 1e-6  # of the initial error: the largest remaining error if rounding keeps it from falling further
ITERATIONS = 2000  # more than any data needed; a system that needs more has no answer in floating point
FLOOR = 1e-12  # relative; eigenvalues of the preconditioner below this are rounding
ENOUGH = 4e-5  # a solution this close has 1 + 2e-9 times the least error; float32 can be that close
SINGLE_ITERATIONS = 60  # in float32; if it needs more, rounding prevents convergence


class Operator(Protocol):
    """X (m, n) -> sum_b L_b X R_b, for any storage of the L_b and R_b."""

    def apply(self, X: Tensor) -> Tensor:
        """sum_b L_b X R_b (m, n)."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """C_L = sum_b tr(R_b) L_b (m, m) and C_R = sum_b tr(L_b) R_b (n, n)."""

    def single(self) -> Operator:
        """The operator in float32, for many applications."""


class Unpacked(NamedTuple):
    """The operator from every L_b and R_b as matrices."""

    L: Tensor  # (m, m, N)
    R: Tensor  # (n, n, N)

    def apply(self, X: Tensor) -> Tensor:
        half = X.mT @ self.L  # (m, n, N): L_b X
        return half.reshape(len(self.L), -1) @ self.R.reshape(len(self.R), -1).mT

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = (side.diagonal().sum(1) for side in self)  # (N,): traces
        return self.L @ right, self.R @ left

    def single(self) -> Unpacked:
        return Unpacked(self.L.float(), self.R.float())


class Entries(NamedTuple):
    """The operator from every L_b and R_b, packed, one column each."""

    L: Tensor  # (m(m+1)/2, N)
    R: Tensor  # (n(n+1)/2, N)
    m: int
    n: int

    def apply(self, X: Tensor) -> Tensor:
        rows, columns = packed_index(self.m, X.device), packed_index(self.n, X.device)
        total = torch.zeros_like(X)
        for L, R in zip(self.L.split(ENTRIES_AT_ONCE, 1), self.R.split(ENTRIES_AT_ONCE, 1), strict=True):
            half = X.mT @ L[rows].to(X)  # (m, n, b): L_b X
            total.addmm_(half.reshape(self.m, -1), R[columns].to(X).reshape(self.n, -1).mT)
        return total

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = (
            side[packed_index(d, side.device).diagonal()].sum(0) for side, d in ((self.L, self.m), (self.R, self.n))
        )  # (N,): traces
        return unpack(self.L @ right, self.m), unpack(self.R @ left, self.n)

    def single(self) -> Unpacked:
        sides = ((self.L, self.m), (self.R, self.n))
        return Unpacked(*(side.float()[packed_index(d, side.device)] for side, d in sides))


class Folded(NamedTuple):
    """The operator from the sum of the packed products."""

    P: Tensor  # (n(n+1)/2, m(m+1)/2): sum_b vech(R_b) vech(L_b)^T
    m: int
    n: int

    def apply(self, X: Tensor) -> Tensor:
        rows, columns = packed_index(self.m, X.device), packed_index(self.n, X.device)
        # For every column j of the result: all sum_b (X R_b)[i', j] L_b (m, t), of which L_b's column i' is needed.
        parts = [(X @ self.P[column].to(X)).gather(1, rows).sum(0) for column in columns]
        return torch.stack(parts, 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = (packed_index(d, self.P.device).diagonal() for d in (self.m, self.n))
        return unpack(self.P[right].sum(0), self.m), unpack(self.P[:, left].sum(1), self.n)

    def single(self) -> Folded:
        return self._replace(P=self.P.float())


class Total(NamedTuple):
    """The sum of several operators of one shape."""

    parts: Sequence[Operator]

    def apply(self, X: Tensor) -> Tensor:
        return torch.stack([part.apply(X) for part in self.parts]).sum(0)

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = zip(*(part.factors() for part in self.parts), strict=True)
        return torch.stack(left).sum(0), torch.stack(right).sum(0)

    def single(self) -> Total:
        return Total([part.single() for part in self.parts])


def mean_diagonal(operator: Operator) -> float:
    """Mean of the diagonal of sum_b R_b (x) L_b: the scale that makes a ridge relative."""
    C_L, C_R = operator.factors()
    return float(C_L.trace()) / (len(C_L) * len(C_R))


def solve(operator: Operator, rhs: Tensor, lam: float, tolerance: float | None = None) -> Tensor:
    """X (m, n) with sum_b L_b X R_b + lam X = rhs, by preconditioned conjugate gradients from 0.

    They end when the error in the norm of the operator, as the preconditioner estimates it, has fallen by `tolerance`
    (by default what the dtype can reach: 1e-10 in float64). Directions in which nothing varies stay 0. If float32 can
    reach the tolerance it is used first, and float64 only if that fails.
    """
    size = float(rhs.abs().amax()) / (lam or 1.0)  # a bound on the solution, to keep float32 within its range
    if tolerance is not None and tolerance >= ENOUGH and size > 0:
        found = _descend(operator.single(), (rhs / size).float(), lam, tolerance, SINGLE_ITERATIONS)
        if found is not None:
            return size * found.to(rhs)
    tolerance = torch.finfo(rhs.dtype).eps ** 0.64 if tolerance is None else tolerance
    found = _descend(operator, rhs, lam, tolerance, ITERATIONS)
    if found is None:
        raise SingularSystemError(
            f"the system of {rhs.shape[0]} x {rhs.shape[1]} kept dimensions was not solved in {ITERATIONS} steps at "
            f"lambda={lam:g}; raise the ridge or calibrate on more samples"
        )
    return found


def _descend(operator: Operator, rhs: Tensor, lam: float, tolerance: float, iterations: int) -> Tensor | None:
    """Conjugate gradients; None if `iterations` were not enough, or the operator is not positive definite."""
    inverse = _preconditioner([C.to(rhs) for C in operator.factors()], lam)
    X, residual = torch.zeros_like(rhs), rhs.clone()
    z = inverse(residual)
    direction, size = z, float((residual * z).sum())
    enough = tolerance**2 * size
    for _ in range(iterations):
        if size <= enough:
            return X
        image = operator.apply(direction).add_(direction, alpha=lam)
        curvature = float((direction * image).sum())
        if curvature <= 0:  # the sums are not positive definite, or nothing varies in the remaining direction
            return None
        step = size / curvature
        X.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        z = inverse(residual)
        last, size = size, float((residual * z).sum())
        direction = z + size / last * direction
    return X if size <= (GOOD / tolerance) ** 2 * enough else None


def solve_vanishing(operator: Operator, rhs: Tensor, scale: float) -> Tensor:
    """`solve` in the limit lambda -> 0+, for the optimum J*, in which an error of the solution is of second order."""
    eps = torch.finfo(rhs.dtype).eps
    for relative in VANISHING[:-1]:  # the smallest at which the rounded system can be solved
        found = _descend(operator, rhs, max(relative, eps) * scale, eps**0.6, ITERATIONS)
        if found is not None:
            return found
    return solve(operator, rhs, VANISHING[-1] * scale, eps**0.6)


def _preconditioner(factors: Sequence[Tensor], lam: float) -> Callable[[Tensor], Tensor]:
    """(C_L (x) C_R / tau + lam I)^-1, through the eigenbases of C_L and C_R."""
    (left, U), (right, V) = (torch.linalg.eigh(C) for C in factors)
    tau = left.sum().clamp(min=torch.finfo(left.dtype).tiny)
    values = (left.clamp(min=0) / tau)[:, None] * right.clamp(min=0) + lam  # (m, n)
    largest = values.amax()
    values = values.clamp(min=FLOOR * float(largest) if largest > 0 else 1.0)
    return lambda X: U @ ((U.mT @ X @ V) / values) @ V.mT
