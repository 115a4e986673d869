"""Positive definite systems: their solutions, in float32 too, and the least ridge at which they have one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics import linalg
from tests.helpers.seeds import seeded

D = 12


def rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(D, D, generator=seeded(1), dtype=torch.float64)).Q


def with_eigenvalues(values: Tensor) -> Tensor:
    Q = rotation()
    return Q * values @ Q.mT


def eye(d: int = D) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def small_eigenvalue(value: float) -> Tensor:
    """A matrix with the eigenvalues 1 … 1 and this one."""
    return with_eigenvalues(torch.cat([torch.ones(D - 1), torch.tensor([value])]).double())


@pytest.mark.parametrize("d", [1, 7, 512, 513, 1100])
def test_the_energy_of_a_map_takes_half_of_the_product_and_equals_all_of_it(d: int) -> None:
    A, S = (torch.randn(rows, d, generator=seeded(3), dtype=torch.float64) for rows in (5, d))
    S = S + S.mT
    assert linalg.energy_in(A, S) == pytest.approx(float((A @ S * A).sum()), rel=1e-12)


def test_the_upper_triangle_is_unpacked_as_it_was_packed() -> None:
    A = torch.randn(9, 9, generator=seeded(4), dtype=torch.float64)
    assert torch.equal(linalg.unpack_upper(linalg.pack(A), 9), A.triu())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("least", [1e-4, 0.0])
def test_what_the_optimum_explains_is_that_of_its_solution(least: float, dtype: torch.dtype) -> None:
    """At 0 the right-hand side is in the range of the matrix, as every covariance with its variables is."""
    A = small_eigenvalue(least)
    rhs = A @ torch.randn(D, 3, generator=seeded(5), dtype=torch.float64)
    expected = float((torch.linalg.pinv(A, hermitian=True) @ rhs * rhs).sum())
    found = linalg.explained_at_best(A.to(dtype), rhs.to(dtype), linalg.mean_diagonal(A))
    assert found == pytest.approx(expected, rel=1e-8 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("refinements", [linalg.REFINEMENTS, 0])
def test_float32_solutions_are_refined_or_replaced(refinements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest eigenvalue rounding is worst: a factor in float32 alone is off by up to 1e-3."""
    monkeypatch.setattr(linalg, "REFINEMENTS", refinements)
    A = with_eigenvalues(torch.logspace(0, -5, D, dtype=torch.float64)).float()
    rhs = torch.linalg.eigh(A.double()).eigenvectors[:, :1].float()
    expected = torch.linalg.solve(A.double(), rhs.double())
    found = linalg.solve_ridge(A, rhs, 0.0)
    assert found.dtype == torch.float32
    rough = torch.cholesky_solve(rhs, torch.linalg.cholesky(A)).double()
    assert float((rough - expected).norm()) > 5e-6 * float(expected.norm())
    assert float((found.double() - expected).norm()) < 2e-6 * float(expected.norm())


def test_a_ridge_is_raised_to_the_first_power_of_ten_that_helps() -> None:
    A, rhs = small_eigenvalue(-5e-4), torch.randn(D, 3, generator=seeded(2), dtype=torch.float64)
    found = linalg.solve_raised(A, rhs, 1e-5)
    torch.testing.assert_close(found, torch.linalg.solve(A + 1e-3 * eye(), rhs))
    unraised = linalg.solve_raised(A + 1e-3 * eye(), rhs, 1e-5)
    torch.testing.assert_close(unraised, torch.linalg.solve(A + (1e-3 + 1e-5) * eye(), rhs))


def test_a_ridge_is_raised_by_ten_to_the_eighth_at_the_most() -> None:
    A, rhs = small_eigenvalue(-0.5), eye()
    torch.testing.assert_close(linalg.solve_raised(A, rhs, 1e-8), torch.linalg.inv(A + eye()))
    with pytest.raises(SingularSystemError, match=r"not positive definite at lambda=0\.1"):
        linalg.solve_raised(A, rhs, 1e-9)


@pytest.mark.parametrize("expected", [1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_vanishing_ridge_is_the_least_that_works(expected: float, scale: float) -> None:
    A, rhs = scale * small_eigenvalue(-expected / 2), torch.randn(D, 3, generator=seeded(3), dtype=torch.float64)
    found = linalg.solve_vanishing(A, rhs, scale)
    torch.testing.assert_close(found, torch.linalg.solve(A + expected * scale * eye(), rhs), rtol=1e-4, atol=1e-4)


def test_what_no_ridge_helps_is_an_error() -> None:
    with pytest.raises(SingularSystemError, match="lambda=10"):
        linalg.solve_vanishing(small_eigenvalue(-20.0), eye(), 1.0)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_dimensions_without_variance_are_solved_by_zero(lam: float) -> None:
    A, rhs = with_eigenvalues(torch.linspace(1, 2, D, dtype=torch.float64)), torch.ones(D, 2, dtype=torch.float64)
    A[3] = A[:, 3] = 0
    assert linalg.dead(A).nonzero().tolist() == [[3]]
    live = [i for i in range(D) if i != 3]
    found = linalg.solve_ridge(A, rhs, lam)
    assert found[3].tolist() == [0, 0]
    torch.testing.assert_close(found[live], torch.linalg.solve(A[live][:, live] + lam * eye(D - 1), rhs[live]))


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_what_has_no_variance_is_judged_beside_the_largest(unit: float) -> None:
    A = unit * torch.tensor([1.0, 1e-17, 1e-14, 0.0], dtype=torch.float64).diag()
    assert linalg.dead(A).tolist() == [False, True, False, True]


def test_no_dimensions_are_no_problem() -> None:
    nothing = torch.zeros(0, 0, dtype=torch.float64)
    assert linalg.mean_diagonal(nothing) == 0
    assert linalg.dead(nothing).shape == (0,)
    assert linalg.solve_ridge(nothing, torch.zeros(0, 2, dtype=torch.float64), 1.0).shape == (0, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_packed_matrices_are_mapped_as_whole_ones(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "MAPPED_AT_ONCE", 2)
    x = torch.randn(count, 9, 5, generator=seeded(4), dtype=torch.float64)
    S, M = x.mT @ x, torch.randn(3, 5, generator=seeded(5), dtype=torch.float64)
    packed = linalg.pack(S)
    assert packed.shape == (count, linalg.packed_size(5))
    found = linalg.map_packed(packed.mT, 5, M)
    torch.testing.assert_close(linalg.unpack(found.mT, 3), M @ S @ M.mT)
    torch.testing.assert_close(linalg.unpack(linalg.packed_outer(x[0]), 5), x[0, :, :, None] * x[0, :, None])
