"""How sums of Kronecker products are solved: in float32 where that is enough, with ridges that vanish."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics import kronecker, logit
from corp.numerics.kronecker import ENOUGH, Entries, Folded, Operator, Total, Unpacked
from corp.numerics.linalg import pack
from tests.helpers.seeds import seeded

M, N = 4, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def sides() -> tuple[Tensor, Tensor]:
    """L (9, M, M) and R (9, N, N)."""
    x, y = draw(9, 6, M, seed=1), draw(9, 6, N, seed=2)
    return x.mT @ x, y.mT @ y


def entries(L: Tensor, R: Tensor) -> Entries:
    return Entries(pack(L).mT.contiguous(), pack(R).mT.contiguous(), M, N)


def matrix(L: Tensor, R: Tensor) -> Tensor:
    """sum_b L_b (x) R_b, of rows stacked."""
    return torch.einsum("bij,bkl->ikjl", L, R).reshape(M * N, M * N)


def solution(G: Tensor, rhs: Tensor, lam: float) -> Tensor:
    return torch.linalg.solve(G + lam * torch.eye(M * N, dtype=torch.float64), rhs.reshape(-1)).view(M, N)


class Given(NamedTuple):
    """An operator whose products in float64, or in float32, are none that should be needed."""

    inner: Operator
    double: bool
    float32: bool

    def apply(self, X: Tensor) -> Tensor:
        assert self.double
        return self.inner.apply(X)

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.inner.factors()

    def single(self) -> Operator:
        assert self.float32
        return self.inner.single()


def test_operators_in_float32_are_those_in_float64() -> None:
    L, R = sides()
    packed = entries(L, R)
    unpacked = Unpacked(L.permute(1, 2, 0), R.permute(1, 2, 0))
    X = draw(M, N, seed=3)
    for operator in (packed, unpacked, Folded(pack(R).mT @ pack(L), M, N), Total([packed, unpacked])):
        thin = operator.single()
        assert thin.apply(X.float()).dtype == torch.float32
        expected = operator.apply(X)
        torch.testing.assert_close(
            thin.apply(X.float()).double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max()
        )
        for found, factor in zip(thin.factors(), operator.factors(), strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), factor, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(unpacked.factors(), packed.factors())


@pytest.mark.parametrize("tolerance", [ENOUGH, 1e-3])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_float32_is_enough_for_a_tolerance_that_it_can_hold(tolerance: float, size: float, ridge: float) -> None:
    """Whatever the size of the right-hand side; the operator's stays within what float32 can hold."""
    L, R = sides()
    rhs, lam = size * draw(M, N, seed=3), ridge * kronecker.mean_diagonal(entries(L, R))
    found = kronecker.solve(Given(entries(L, R), False, True), rhs, lam, tolerance)
    assert found.dtype == torch.float64
    off, expected = found - (best := solution(matrix(L, R), rhs, lam)), best
    assert float(off.norm()) < 30 * tolerance * float(expected.norm())
    assert float(off.norm()) > 1e-9 * float(expected.norm())


@pytest.mark.parametrize("tolerance", [None, ENOUGH / 10])
def test_float32_is_not_tried_where_it_cannot_hold_the_tolerance(tolerance: float | None) -> None:
    L, R = sides()
    rhs = draw(M, N, seed=3)
    found = kronecker.solve(Given(entries(L, R), True, False), rhs, 0.0, tolerance)
    torch.testing.assert_close(found, solution(matrix(L, R), rhs, 0.0), rtol=1e-3, atol=1e-4)


def test_float64_is_used_where_float32_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "SINGLE_ITERATIONS", 1)
    L, R = sides()
    rhs = draw(M, N, seed=3)
    with pytest.raises(AssertionError):
        kronecker.solve(Given(entries(L, R), False, True), rhs, 0.0, ENOUGH)
    found = kronecker.solve(Given(entries(L, R), True, True), rhs, 0.0, ENOUGH)
    torch.testing.assert_close(found, solution(matrix(L, R), rhs, 0.0), rtol=1e-3, atol=1e-3)


def test_what_is_almost_solved_when_steps_run_out_is_taken_and_what_is_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    L, R = sides()
    rhs, G = draw(M, N, seed=3), matrix(L, R)
    expected = solution(G, rhs, 0.0).reshape(-1)
    taken: list[float] = []
    for steps in range(1, 2 * M * N):
        monkeypatch.setattr(kronecker, "ITERATIONS", steps)
        try:
            off = kronecker.solve(entries(L, R), rhs, 0.0).reshape(-1) - expected
        except SingularSystemError:
            assert not taken  # further steps only help
            continue
        taken.append(float((off @ G @ off / (expected @ G @ expected)).sqrt()))  # in the norm of the operator
    assert 2.5e-8 < taken[0] < 1e-5  # a millionth of the start is good enough
    assert taken[-1] < 1e-9


@pytest.mark.parametrize("expected", [1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_vanishing_ridge_is_the_least_that_works(expected: float, scale: float) -> None:
    """The operator of one indefinite factor: as soon as the ridge exceeds its negative eigenvalue, it is solved."""
    values = torch.tensor([1.0, 2, 3, -expected / 2], dtype=torch.float64)
    Q = torch.linalg.qr(draw(M, M, seed=4)).Q
    L, R = scale * (Q * values @ Q.mT)[None], torch.eye(N, dtype=torch.float64)[None]
    rhs = draw(M, N, seed=3)
    found = kronecker.solve_vanishing(entries(L, R), rhs, scale)
    torch.testing.assert_close(found, solution(matrix(L, R), rhs, expected * scale), rtol=1e-3, atol=1e-3)


def test_what_no_ridge_helps_is_an_error() -> None:
    L, R = -100 * torch.eye(M, dtype=torch.float64)[None], torch.eye(N, dtype=torch.float64)[None]
    with pytest.raises(SingularSystemError, match="lambda=10"):
        kronecker.solve_vanishing(entries(L, R), draw(M, N, seed=3), 1.0)


def test_directions_in_which_nothing_varies_stay_zero() -> None:
    L, R = sides()
    L[:, 2] = L[:, :, 2] = 0
    G = matrix(L, R)
    rhs = (G @ draw(M * N, seed=5)).view(M, N)
    for lam in (0.0, 1e-2):
        found = kronecker.solve(entries(L, R), rhs, lam)
        assert float(found[2].abs().max()) < 1e-4 * float(found.abs().max())  # rounding over the least eigenvalue
        live = torch.tensor([0, 1, 3])
        whole = G.view(M, N, M, N)[live][:, :, live].reshape(3 * N, 3 * N) + lam * torch.eye(3 * N, dtype=torch.float64)
        torch.testing.assert_close(found[live].reshape(-1), torch.linalg.solve(whole, rhs[live].reshape(-1)))


def test_nothing_to_solve_for_needs_no_float32() -> None:
    L, R = sides()
    for some in (L, 0 * L):
        assert not kronecker.solve(Given(entries(some, R), True, False), torch.zeros(M, N).double(), 0.0, ENOUGH).any()


def test_nothing_is_solved_more_precisely_than_floating_point_allows() -> None:
    class Counted(Given):
        def apply(self, X: Tensor) -> Tensor:
            steps.append(len(steps))
            return self.inner.apply(X)

    steps: list[int] = []
    L, R = sides()
    operator, rhs = Counted(entries(L, R), True, False), draw(M, N, seed=3)
    for solve in (kronecker.solve, kronecker.solve_vanishing):
        steps.clear()
        solve(operator, rhs, 1e-3)
        assert len(steps) <= 2 * M * N


def test_the_tolerance_of_logits_holds_from_a_ridge_on() -> None:
    L, R = sides()
    for ridge, single in ((logit.PRECISE_BELOW, True), (0.9 * logit.PRECISE_BELOW, False)):
        system = logit.LogitSystem(Given(entries(L, R), not single, single), draw(M, N, seed=3), 1.0, 1.0)
        found = logit.fit_logit(system, ridge=ridge, tolerance=1e-3)
        torch.testing.assert_close(found, solution(matrix(L, R), system.h, ridge), rtol=1e-2, atol=1e-2)
