"""The factored output head, against brute force on data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.numerics.affine import Folded
from corp.numerics.output import LowRank, low_rank, output_error, output_spectrum

V, D, N = 23, 7, 400


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(N, D, dtype=torch.float64) @ torch.randn(D, D, dtype=torch.float64) + 3 * torch.randn(D).double()


@pytest.fixture
def head() -> Folded:
    return Folded(torch.randn(V, D, dtype=torch.float64), torch.randn(V, dtype=torch.float64))


def moments(h: Tensor) -> tuple[Tensor, Tensor]:
    mean = h.mean(0)
    return mean, (h - mean).mT @ (h - mean) / len(h)


def measured(head: Folded, made: LowRank, h: Tensor) -> float:
    """Squared distance of the logits, each token's free to move by one number."""
    gap = h @ head.W.mT + head.b - (h @ made.P.mT @ made.U.mT + made.b)
    return float((gap - gap.mean(1, keepdim=True)).square().sum(1).mean())


@pytest.mark.parametrize("rank", [1, 3, D])
def test_the_error_is_the_measured_one_and_the_sum_of_what_is_left_out(rank: int, head: Folded, hidden: Tensor) -> None:
    mean, cov = moments(hidden)
    spectrum = output_spectrum(head.W, cov)
    made = low_rank(head, mean, spectrum, rank)
    expected = measured(head, made, hidden)
    assert output_error(head, made, mean, cov) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert float(spectrum.energies[rank:].sum()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_no_other_head_of_that_rank_is_nearer(head: Folded, hidden: Tensor) -> None:
    mean, cov = moments(hidden)
    best = low_rank(head, mean, output_spectrum(head.W, cov), 3)
    least = measured(head, best, hidden)
    for _ in range(20):
        P, U = best.P + 0.05 * torch.randn_like(best.P), best.U + 0.05 * torch.randn_like(best.U)
        gap = hidden @ head.W.mT + head.b - hidden @ P.mT @ U.mT
        assert measured(head, LowRank(P, U, gap.mean(0)), hidden) > least  # with the best bias it can have


def test_full_rank_gives_the_same_distribution(head: Folded, hidden: Tensor) -> None:
    mean, cov = moments(hidden)
    made = low_rank(head, mean, output_spectrum(head.W, cov), D)
    dense, thin = hidden @ head.W.mT + head.b, hidden @ made.P.mT @ made.U.mT + made.b
    torch.testing.assert_close(thin.softmax(1), dense.softmax(1))
    torch.testing.assert_close(made.U.mean(0), torch.zeros(D, dtype=torch.float64))  # softmax ignores it


def test_a_direction_that_never_varies_costs_nothing(head: Folded, hidden: Tensor) -> None:
    hidden[:, 2] = 5.0
    mean, cov = moments(hidden)
    made = low_rank(head, mean, output_spectrum(head.W, cov), D - 1)
    assert measured(head, made, hidden) == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_any_head_is_the_measured_one(head: Folded, hidden: Tensor) -> None:
    mean, cov = moments(hidden)
    made = LowRank(torch.randn(2, D).double(), torch.randn(V, 2).double(), 5 + torch.randn(V).double())
    assert output_error(head, made, mean, cov) == pytest.approx(measured(head, made, hidden))


def test_hidden_states_that_never_vary_have_a_finite_spectrum(head: Folded) -> None:
    nothing = torch.zeros(D, D, dtype=torch.float64)
    spectrum = output_spectrum(head.W, nothing)
    assert all(bool(torch.isfinite(part).all()) for part in spectrum)
    made = low_rank(head, torch.ones(D, dtype=torch.float64), spectrum, 2)
    assert output_error(head, made, torch.ones(D, dtype=torch.float64), nothing) == pytest.approx(0.0, abs=1e-9)
