"""Sums of Kronecker products, against the matrices that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics import kronecker
from corp.numerics.kronecker import Entries, Folded, Operator, Total
from corp.numerics.linalg import pack

M, N = 4, 3


def sides(count: int, rank: int = 6) -> tuple[Tensor, Tensor]:
    """L (count, M, M) and R (count, N, N) of Grams that differ from entry to entry."""
    x, y = (torch.randn(count, rank, d, dtype=torch.float64) * torch.randn(count, 1, d).exp() for d in (M, N))
    return x.mT @ x, y.mT @ y


def operators(L: Tensor, R: Tensor) -> list[Operator]:
    left, right = pack(L), pack(R)
    entries = Entries(left.mT.contiguous(), right.mT.contiguous(), M, N)
    half = len(L) // 2
    parts = [Entries(left[part].mT, right[part].mT, M, N) for part in (slice(0, half), slice(half, None))]
    return [entries, Folded(right.mT @ left, M, N), Total(parts)]


def matrix(L: Tensor, R: Tensor) -> Tensor:
    """sum_b L_b (x) R_b, of rows stacked."""
    return sum((torch.kron(a, b) for a, b in zip(L, R, strict=True)), torch.zeros(M * N, M * N, dtype=torch.float64))


@pytest.mark.parametrize("count", [7, 300])  # fewer and more entries than are unpacked at once
def test_operators_are_their_matrix(count: int) -> None:
    L, R = sides(count)
    X, G = torch.randn(M, N, dtype=torch.float64), matrix(L, R)
    C_L = sum(b.trace() * a for a, b in zip(L, R, strict=True))
    C_R = sum(a.trace() * b for a, b in zip(L, R, strict=True))
    for operator in operators(L, R):
        torch.testing.assert_close(operator.apply(X).reshape(-1), G @ X.reshape(-1))
        torch.testing.assert_close(operator.factors(), (C_L, C_R))
        assert kronecker.mean_diagonal(operator) == pytest.approx(float(G.diagonal().mean()))


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 1e-3, 1.0])
def test_solutions_are_those_of_the_matrix(ridge: float) -> None:
    L, R = sides(9)
    G, rhs = matrix(L, R), torch.randn(M, N, dtype=torch.float64)
    lam = ridge * float(G.diagonal().mean())
    expected = torch.linalg.solve(G + lam * torch.eye(M * N, dtype=torch.float64), rhs.reshape(-1)).view(M, N)
    for operator in operators(L, R):
        torch.testing.assert_close(kronecker.solve(operator, rhs, lam), expected, rtol=1e-8, atol=1e-8)


def test_the_vanishing_ridge_gives_the_least_error_of_a_singular_system() -> None:
    L, R = sides(3, rank=2)  # rank 4 each, of 12
    G, target = matrix(L, R), torch.randn(M * N, dtype=torch.float64)
    h = G @ target
    for operator in operators(L, R):
        X = kronecker.solve_vanishing(operator, h.view(M, N), kronecker.mean_diagonal(operator)).reshape(-1)
        gap = X - target
        assert float(gap @ G @ gap) < 1e-9 * float(target @ h)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_one_product_is_solved_at_once(unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "ITERATIONS", 2)
    L, R = (unit * side for side in sides(1))
    rhs = torch.randn(M, N, dtype=torch.float64)
    X = kronecker.solve(operators(L.expand(2, M, M), R.expand(2, N, N))[0], rhs, 0.0)
    torch.testing.assert_close(2 * L[0] @ X @ R[0], rhs)


def test_a_head_of_128_dimensions_needs_no_matrix_of_its_16384_unknowns() -> None:
    x, y = torch.randn(2, 5, 150, 128, dtype=torch.float64)
    L, R = x.mT @ x, y.mT @ y
    operator = Entries(pack(L).mT.contiguous(), pack(R).mT.contiguous(), 128, 128)
    rhs = torch.randn(128, 128, dtype=torch.float64)
    lam = 1e-3 * kronecker.mean_diagonal(operator)
    X = kronecker.solve(operator, rhs, lam)
    left = sum(a @ X @ b for a, b in zip(L, R, strict=True)) + lam * X - rhs
    assert float(left.norm()) < 1e-7 * float(rhs.norm())


def test_what_is_not_solved_in_time_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "ITERATIONS", 1)
    with pytest.raises(SingularSystemError, match=r"4 x 3 kept dimensions .* raise the ridge or calibrate on more"):
        kronecker.solve(operators(*sides(9))[0], torch.randn(M, N, dtype=torch.float64), 0.0)
