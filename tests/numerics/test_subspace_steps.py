"""The steps of a subspace fit: in what precision, with which ridge, and that none makes it worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.head_grams import SampledHead
from corp.numerics import subspace
from corp.numerics.kronecker import Entries, Operator
from corp.numerics.linalg import pack
from tests.helpers.seeds import seeded

D, KEEP = 6, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def head() -> SampledHead:
    q, k = draw(7, 11, D, seed=1) @ draw(D, D, seed=2), draw(7, 11, D, seed=3) @ draw(D, D, seed=4)
    k = k * draw(7, 1, D, seed=5).exp()  # samples differ: there is something to gain by steps
    return SampledHead(D, *(pack(x.mT @ x).mT.contiguous() for x in (q, k)))


class Noted:
    """Sums of a head that write down in which precision they are mapped."""

    def __init__(self, inner: SampledHead, notes: list[torch.dtype]) -> None:
        self.inner, self.notes = inner, notes

    def energy(self) -> Tensor:
        return self.inner.energy()

    def normal(self, A: Tensor | None = None, B: Tensor | None = None) -> Operator:
        if A is not None or B is not None:
            self.notes.append(self.inner.q.dtype)
        return self.inner.normal(A, B)

    def single(self) -> Noted:
        self.notes.append(torch.float16)  # stands for the conversion
        return Noted(self.inner.single(), self.notes)


@pytest.mark.parametrize(
    ("tolerance", "ridge", "sweeps", "expected"),
    [
        (1e-3, 1e-3, 1, [torch.float16, torch.float32, torch.float32]),
        (1e-3, 1e-3, 2, [torch.float16, *[torch.float32] * 4]),
        (1e-3, 1e-3, 0, []),
        (None, 1e-3, 1, [torch.float64, torch.float64]),
        (1e-3, 0.0, 1, [torch.float64, torch.float64]),
    ],
)
def test_steps_are_in_float32_if_a_tolerance_and_a_ridge_allow_it(
    tolerance: float | None, ridge: float, sweeps: int, expected: list[torch.dtype]
) -> None:
    notes: list[torch.dtype] = []
    fit = subspace.fit_subspace([Noted(head(), notes)], KEEP, ridge=ridge, sweeps=sweeps, tolerance=tolerance)
    assert notes == expected
    precise = subspace.fit_subspace([head()], KEEP, ridge=ridge, sweeps=sweeps)
    assert fit.A.dtype == torch.float64
    found, best = (subspace.error(head(), x.A[0], x.B) for x in (fit, precise))
    assert found == pytest.approx(best, rel=1e-4)


def test_without_a_sweep_the_fit_is_the_start_and_one_is_the_default() -> None:
    whole = subspace.leading(subspace.nested([head()]), KEEP)
    start, once = (subspace.fit_subspace([head()], KEEP, ridge=1e-3, sweeps=sweeps) for sweeps in (0, 1))
    default = subspace.fit_subspace([head()], KEEP, ridge=1e-3)
    torch.testing.assert_close(start.A.mT @ start.B, whole.A.mT @ whole.B)
    assert torch.equal(default.A, once.A)
    assert subspace.error(head(), once.A[0], once.B) < 0.99 * subspace.error(head(), start.A[0], start.B)


@pytest.mark.parametrize(("negative", "power"), [(0.0, 0), (5e-4, 1), (5e-2, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_ridge_is_raised_a_hundredfold_until_the_step_can_be_solved(
    negative: float, power: int, scale: float
) -> None:
    values = torch.tensor([1.0, 1, 1, 1, 1 + negative, -negative], dtype=torch.float64)
    values[-1] += 1 if power == 0 else 0
    Q = torch.linalg.qr(draw(D, D, seed=6)).Q
    L, R = scale * (Q * values @ Q.mT), torch.eye(KEEP, dtype=torch.float64)
    operator = Entries(pack(L)[:, None], pack(R)[:, None], D, KEEP)
    residual = draw(D, KEEP, seed=7)
    lam = 1e-5 * 100**power * float(L.diagonal().mean())
    found, used = subspace._step(operator, residual, 1e-5, None)
    expected = torch.linalg.solve(L + lam * torch.eye(D, dtype=torch.float64), residual)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert used == pytest.approx(1e-5 * 100**power)


def test_a_step_that_no_ridge_makes_possible_is_none() -> None:
    """The third and last ridge, 1e-1 of the scale, is too small for this eigenvalue."""
    values = torch.tensor([1.0, 1, 1, 1, 1, -0.3], dtype=torch.float64)
    Q = torch.linalg.qr(draw(D, D, seed=6)).Q
    R = torch.eye(KEEP, dtype=torch.float64)
    operator = Entries(pack(Q * values @ Q.mT)[:, None], pack(R)[:, None], D, KEEP)
    change, used = subspace._step(operator, draw(D, KEEP, seed=7), 1e-5, None)
    assert not change.any()
    assert used == pytest.approx(1e-1)
    assert subspace._step(operator, draw(D, KEEP, seed=7), 1e-4, None)[0].any()


@pytest.mark.parametrize("s", [1e-6, 1.0])
@pytest.mark.parametrize("direction", [draw(D, seed=4), torch.eye(D, dtype=torch.float64)[2]], ids=["any", "axis"])
def test_keys_of_one_direction_need_one_dimension(direction: Tensor, s: float) -> None:
    """Whatever the unit: what does not vary, up to rounding or at all, is small beside what does."""
    q, k = draw(7, 11, D, seed=1), s * draw(7, 11, 1, seed=3) * direction
    sums = SampledHead(D, *(pack(x.mT @ x).mT.contiguous() for x in (q, k)))
    (A,), B, _ = subspace.leading(subspace.nested([sums]), 1)
    torch.testing.assert_close((q @ A.mT) @ (k @ B.mT).mT / s, q @ k.mT / s, rtol=1e-4, atol=1e-4)
