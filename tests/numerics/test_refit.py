"""Taking over a gap: the numerics and the sums of sequential fitting, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.numerics import refit
from corp.numerics.refit import RIDGES, GapMoments, choose_ridge, fit_gap, gap_left, gap_of, mixed
from corp.surgery.refit.gaps import GapSums, TokenSums
from tests.helpers.seeds import seeded


def tokens(count: int = 400, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Correlated inputs x (N, 6) and gaps (N, 3) that are partly linear in them; no mean is zero."""
    generator = seeded(3)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, 6, generator=generator, dtype=torch.float64
    )
    x = x + torch.arange(6) * 2.0
    linear = torch.randn(3, 6, generator=seeded(4), dtype=torch.float64)
    return x, x @ linear.mT + 1 + noise * torch.randn(count, 3, generator=generator, dtype=torch.float64)


def sums_of(x: Tensor, gap: Tensor, pieces: int = 3) -> GapSums:
    sums = GapSums(x.shape[1], gap.shape[1])
    for some, behind in zip(x.tensor_split(pieces), gap.tensor_split(pieces), strict=True):
        sums.update(some, behind)
    return sums


@pytest.mark.parametrize("intercept", [True, False])
def test_fit_equals_brute_force_ridge(intercept: bool) -> None:
    x, gap = tokens()
    fit = fit_gap(sums_of(x, gap).moments(intercept), 0.1)
    A, G = (x - x.mean(0), gap - gap.mean(0)) if intercept else (x, gap)
    lam = 0.1 * A.square().mean(0).mean()
    # Ridge is plain least squares with sqrt(N lambda) I stacked under the data.
    stacked = torch.cat([A, (len(x) * lam).sqrt() * torch.eye(6, dtype=torch.float64)])
    expected = torch.linalg.lstsq(stacked, torch.cat([G, torch.zeros(6, 3, dtype=torch.float64)])).solution.mT
    torch.testing.assert_close(fit.R, expected)
    torch.testing.assert_close(fit.c, gap.mean(0) - expected @ x.mean(0) if intercept else torch.zeros_like(fit.c))


@pytest.mark.parametrize("intercept", [True, False])
def test_what_is_left_is_what_tokens_say(intercept: bool) -> None:
    x, gap = tokens()
    moments = sums_of(x, gap).moments(intercept)
    fit = fit_gap(moments, 1.0)
    expected = (gap - x @ fit.R.mT - fit.c).square().sum(1).mean()
    assert gap_left(moments, fit) == pytest.approx(float(expected))


def test_sums_of_parts_add() -> None:
    x, gap = tokens()
    whole = sums_of(x, gap).moments(True)
    parts = [GapSums(6, 3), GapSums(6, 3)]
    for sums, rows in zip(parts, (slice(0, 100), slice(100, None)), strict=True):
        sums.shift = x[:50].mean(0)
        sums.update(x[rows], gap[rows])
    both = (parts[0] + parts[1]).moments(True)
    for a, b in zip(both, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_float32_sums_survive_a_large_mean() -> None:
    x, gap = tokens()
    exact = sums_of(x + 1000, gap).moments(True)
    rounded = sums_of((x + 1000).float(), gap.float()).moments(True)
    torch.testing.assert_close(rounded.cross, exact.cross, rtol=1e-3, atol=1e-3)


def test_the_more_noise_the_less_is_corrected() -> None:
    def chosen(count: int, noise: float) -> float | None:
        parts = [
            sums_of(*(part[rows] for part in tokens(count, noise))) for rows in (slice(0, None, 2), slice(1, None, 2))
        ]
        return choose_ridge(*(part.moments(True) for part in parts))

    clean, noisy = chosen(400, 0.01), chosen(20, 20.0)
    assert clean == RIDGES[0]
    assert noisy is None or noisy >= 1


def test_a_gap_that_the_held_out_part_has_not_is_left_alone() -> None:
    x, gap = tokens(noise=0.0)
    assert choose_ridge(sums_of(x, gap).moments(True), sums_of(x, -gap).moments(True)) is None


@pytest.mark.parametrize("intercept", [True, False])
def test_tokens_that_are_read_count_half(intercept: bool) -> None:
    """The same as weighting every token, by brute force."""
    x, gap = tokens()
    read = torch.arange(len(x)) % 10 == 0
    sums = TokenSums(6, 3, 0.5)
    sums.shift_by(x[0])
    for some in range(4):
        part = torch.arange(len(x)) % 4 == some
        sums.update(x[part], gap[part], read[part], ~read[part])
    found = sums.moments(intercept)
    weight = torch.where(read, 0.5 / read.sum(), 0.5 / (~read).sum())[:, None].double()
    mean, middle = (weight * x).sum(0) * intercept, (weight * gap).sum(0) * intercept
    torch.testing.assert_close(found.cov, (x - mean).mT @ (weight * (x - mean)))
    torch.testing.assert_close(found.cross, (gap - middle).mT @ (weight * (x - mean)))
    assert gap_of(found) == pytest.approx(float((weight * gap.square()).sum()))


def test_ridges_without_a_factor_are_no_candidates() -> None:
    """A covariance that rounding made indefinite: small ridges do not solve it, larger ones do."""
    x, gap = tokens()
    moments = sums_of(x, gap).moments(True)
    values, vectors = torch.linalg.eigh(moments.cov)
    values[0] = -1e-3 * values.mean()
    rounded = moments._replace(cov=vectors * values @ vectors.mT)
    solvable = [ridge for ridge in RIDGES if ridge > 1e-3]
    assert choose_ridge(rounded, moments) == min(solvable, key=lambda r: gap_left(moments, fit_gap(rounded, r)))
    assert choose_ridge(rounded, moments, ridges=(1e-5, 1e-4)) is None


def moments_with_best(ridge: float) -> tuple[GapMoments, GapMoments]:
    """One input, unit variance: the fit shrinks a slope of 1 to 1 / (1 + ridge); that is the slope held out."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    seen = GapMoments(zero, one, zero, one, 2.0)
    return seen, seen._replace(cross=one / (1 + ridge))


@pytest.mark.parametrize("best", RIDGES)
def test_every_ridge_is_found_where_it_is_the_best(best: float) -> None:
    assert choose_ridge(*moments_with_best(best)) == best


def test_only_ridges_on_the_way_downhill_and_beside_it_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def fit(moments: GapMoments, ridge: float) -> refit.Correction:
        tried.append(ridge)
        return fit_gap(moments, ridge)

    monkeypatch.setattr(refit, "fit_gap", fit)
    ridges = [10.0**power for power in range(-4, 5)]
    for best, expected in ((1.0, (-1, 0, 1)), (0.01, (-3, -2, -1, 0, 1)), (1e4, (-1, 0, 1, 2, 3, 4))):
        tried.clear()
        assert choose_ridge(*moments_with_best(best), ridges) == best
        assert sorted(tried) == [10.0**power for power in expected]


def test_of_ridges_that_leave_the_same_the_largest_is_chosen() -> None:
    """Held-out data of which nothing is explained, and nothing to explain: every ridge leaves the same."""
    zero = torch.zeros(1, dtype=torch.float64)
    seen = GapMoments(zero, torch.ones(1, 1).double(), zero + 1, torch.zeros(1, 1).double(), 1.0)
    assert choose_ridge(seen, seen) == RIDGES[-1]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_mixture_has_the_moments_of_its_tokens(share: float) -> None:
    x, gap = tokens()
    parts = [(x[:100], gap[:100]), (5 - x[100:], gap[100:] + 3)]
    found = mixed(*(sums_of(*part).moments(True) for part in parts), share)
    rest = (1 - share) / 300
    weight = torch.cat([torch.full((100, 1), share / 100), torch.full((300, 1), rest)]).double()
    x, gap = (torch.cat(part) for part in zip(*parts, strict=True))
    mean, middle = (weight * x).sum(0), (weight * gap).sum(0)
    torch.testing.assert_close((found.mean, found.gap), (mean, middle))
    torch.testing.assert_close(found.cov, (x - mean).mT @ (weight * (x - mean)))
    torch.testing.assert_close(found.cross, (gap - middle).mT @ (weight * (x - mean)))
    assert found.energy == pytest.approx(float((weight * (gap - middle).square()).sum()))
