"""Sums against two-pass references, and that they add."""

import pytest
import torch

from corp.errors import StatisticsError
from corp.stats import Grams, Moments
from corp.stats.moments import ACTIVE_EPS


def moments_of(*parts: torch.Tensor) -> Moments:
    moments = Moments(parts[0].shape[1])
    for part in parts:
        moments.update(part)
    return moments


def assert_two_pass(moments: Moments, x: torch.Tensor, rtol: float) -> None:
    x = x.double()
    centred = x - x.mean(0)
    cov = centred.T @ centred / len(x)
    torch.testing.assert_close(moments.mean, x.mean(0), rtol=rtol, atol=rtol * float(x.abs().max()))
    torch.testing.assert_close(moments.cov, cov, rtol=rtol, atol=rtol * float(cov.abs().max()))
    torch.testing.assert_close(moments.energy, x.square().mean(0), rtol=max(rtol, 1e-7), atol=0)
    torch.testing.assert_close(moments.active_share, (x.abs() > ACTIVE_EPS).double().mean(0))


def test_streamed_moments_equal_two_passes() -> None:
    x = torch.randn(500, 1100, dtype=torch.float64).cumsum(1) / 10  # wider than two blocks, correlated
    moments = moments_of(x[:100], x[100:101], x[101:])
    assert_two_pass(moments, x, 1e-10)
    assert float(torch.linalg.eigvalsh(moments.cov).min()) > -1e-9


def test_a_large_mean_does_not_drown_a_small_variance() -> None:
    x = (1e4 + 1e-1 * torch.randn(4000, 8)).float()
    assert_two_pass(moments_of(*x.split(500)), x, 1e-4)


def test_moments_add_whatever_their_shifts() -> None:
    x, y = torch.randn(300, 5, dtype=torch.float64), 100 + torch.randn(200, 5, dtype=torch.float64)
    assert_two_pass(moments_of(x) + moments_of(y), torch.cat([x, y]), 1e-10)
    assert_two_pass(moments_of(y) + Moments(5), y, 1e-10)


def test_moments_of_unequal_widths_do_not_add() -> None:
    with pytest.raises(StatisticsError, match="5 and of 6"):
        _ = Moments(5) + Moments(6)


def test_grams_add_single_and_folded() -> None:
    q, k = torch.randn(2, 6, 4, 2 * 3, dtype=torch.float64)
    whole, first, second, folded = Grams(2, 3), Grams(2, 3), Grams(2, 3), Grams(2, 3)
    whole.update(q, k)
    first.update(q[:2], k[:2])
    second.update(q[2:], k[2:])
    folded.update(q[2:], k[2:])
    folded.fold()
    for both in (first + second, first + folded, folded + first):
        assert both.samples == 6
        for h in range(2):
            torch.testing.assert_close(both.head(h).cross(), whole.head(h).cross())
            torch.testing.assert_close(both.head(h).energy(), whole.head(h).energy())


def test_many_samples_are_folded_into_one_sum() -> None:
    grams = Grams(1, 3)
    q, k = torch.randn(2, 300, 4, 3, dtype=torch.float64)
    for i in range(300):
        grams.update(q[i : i + 1], k[i : i + 1])
    assert grams.kron is not None
    expected = sum((q[b].T @ q[b]) @ (k[b].T @ k[b]) for b in range(300))
    torch.testing.assert_close(grams.head(0).cross(), expected)


def test_empty_sums_say_so() -> None:
    with pytest.raises(StatisticsError, match="no tokens"):
        _ = Moments(3).mean
    with pytest.raises(StatisticsError, match="no samples"):
        Grams(1, 3).head(0)
