"""Units do not matter: inputs that are s times as large give the same fits, and errors s^2 times as large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.head_grams import SampledHead
from corp.numerics import affine, exact, lengths, linalg, logit, output, redundancy, refit, rotary, subspace, values
from corp.numerics.rank import strongest
from tests.helpers.seeds import seeded

D, EPS = 8, 1e-3
KEPT, PRUNED = torch.tensor([0, 2, 5, 6]), torch.tensor([1, 3, 4, 7])
UNITS = pytest.mark.parametrize("s", [1e-4, 1e4])  # the smaller makes every mean square less than 1


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def tokens(s: float = 1.0) -> Tensor:  # (150, D), correlated, mean != 0
    return s * (draw(150, D) @ draw(D, D, seed=1) + 1)


def moments(s: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """W (5, D), which stays, and the mean and covariance of the tokens."""
    x = tokens(s)
    return draw(5, D, seed=2), x.mean(0), torch.cov(x.mT, correction=0)


def head(s: float = 1.0) -> SampledHead:
    """Sums of the queries, s times as large, and keys of 7 samples."""
    q, k = s * draw(7, 20, D, seed=3) @ draw(D, D, seed=4), draw(7, 20, D, seed=5) @ draw(D, D, seed=6)
    return SampledHead(D, *(linalg.pack(x.mT @ x).mT.contiguous() for x in (q, k)))


def pairs(s: float = 1.0) -> Tensor:  # (2, D, D), of two heads
    q, k = s * draw(2, 30, D, seed=7) @ draw(D, D, seed=8), draw(2, 30, D, seed=9)
    return rotary.pair_moments(q.mT @ q, k.mT @ k)


def assert_scaled(found: affine.Distortion, expected: affine.Distortion, s: float) -> None:
    errors = torch.tensor([found[:3], expected[:3]], dtype=torch.float64)
    torch.testing.assert_close(errors[0] / s**2, errors[1], rtol=1e-6, atol=0.0)
    assert found.rho2 == pytest.approx(expected.rho2, rel=1e-6)
    assert 1e-3 < found.rho2 < 0.999


@UNITS
def test_of_channels(s: float) -> None:
    one, other = (affine.removal(*moments(unit), KEPT, PRUNED) for unit in (1.0, s))
    fits = [affine.fit_affine(given, ridge=1e-3) for given in (one, other)]
    torch.testing.assert_close(fits[1].V, fits[0].V)
    torch.testing.assert_close(fits[1].c, s * fits[0].c)
    assert_scaled(affine.distortion(other, fits[1]), affine.distortion(one, fits[0]), s)


@UNITS
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_of_channels_that_are_eliminated(s: float, ridge: float) -> None:
    (W, _, cov), (_, _, scaled) = moments(), moments(s)
    one, other = (exact.elimination_path(W, x, ridge=ridge) for x in (cov, scaled))
    assert torch.equal(one.order, other.order)
    torch.testing.assert_close(other.error / s**2, one.error)
    assert one.ridge == other.ridge == ridge


@UNITS
def test_of_queries(s: float) -> None:
    systems = [
        logit.logit_system(h.normal_of(KEPT), h.cross_of(KEPT, PRUNED), h.energy(), PRUNED) for h in (head(), head(s))
    ]
    fits = [logit.fit_logit(system, ridge=1e-3) for system in systems]
    torch.testing.assert_close(fits[1], fits[0])
    assert_scaled(logit.distortion(systems[1], fits[1]), logit.distortion(systems[0], fits[0]), s)


@UNITS
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_of_queries_and_keys_in_a_subspace(s: float, side: str) -> None:
    one, other = head(), head(s)
    if side == "keys":
        one, other = (SampledHead(D, h.k, h.q) for h in (one, other))
    whole = [subspace.nested([h]) for h in (one, other)]
    for keep in range(1, D):
        first, second = (subspace.leading(maps, keep) for maps in whole)
        torch.testing.assert_close(second.A.mT @ second.B, first.A.mT @ first.B)
    fits = [subspace.fit_subspace([h], 3, ridge=1e-3) for h in (one, other)]
    torch.testing.assert_close(fits[1].A.mT @ fits[1].B, fits[0].A.mT @ fits[0].B)
    pairs = zip((other, one), fits[::-1], strict=True)
    found, expected = (subspace.distortion(h, fit.A[0], fit.B, strongest([h.energy()], 3)[1]) for h, fit in pairs)
    assert_scaled(found, expected, s)


@UNITS
def test_of_rotary_queries(s: float) -> None:
    one, other = pairs(), pairs(s)
    for keep in range(1, D // 2):
        kept, pruned = rotary.eliminate(one, keep)
        assert torch.equal(kept, rotary.eliminate(other, keep)[0])
    systems = [rotary.pair_system(A[0], kept, pruned) for A in (one, other)]
    fits = [rotary.fit_pairs(system, ridge=1e-3) for system in systems]
    torch.testing.assert_close(fits[1], fits[0])
    assert_scaled(rotary.distortion(systems[1], fits[1]), rotary.distortion(systems[0], fits[0]), s)


@UNITS
def test_of_values(s: float) -> None:
    (W, _, cov), (_, _, scaled) = moments(), moments(s)
    one, other = (values.value_basis(W, x, 2, 2, 2, ridge=1e-3) for x in (cov, scaled))
    torch.testing.assert_close((s * other.to).abs(), one.to.abs())  # a direction's sign is free
    torch.testing.assert_close((other.back / s).abs(), one.back.abs())


@UNITS
def test_of_hidden_states(s: float) -> None:
    (W, _, cov), (_, _, scaled) = moments(), moments(s)
    one, other = output.output_spectrum(W, cov), output.output_spectrum(W, scaled)
    torch.testing.assert_close(other.energies / s**2, one.energies)
    torch.testing.assert_close((s * other.to[:4]).abs(), one.to[:4].abs())


@UNITS
def test_of_heads_with_a_norm(s: float) -> None:
    sums = []
    for unit in (1.0, s):
        f = lengths.length_features(tokens(unit), unit**2 * EPS)
        sums.append(f.mT @ f)
    one, other = (lengths.fit_length(F, KEPT, unit**2 * EPS, ridge=1e-3) for F, unit in zip(sums, (1, s), strict=True))
    torch.testing.assert_close(other.v, one.v)
    torch.testing.assert_close(other.c / s**2, one.c)
    found, expected = (
        lengths.square_error(F, KEPT, fit, unit**2 * EPS)
        for F, fit, unit in zip(sums, (one, other), (1, s), strict=True)
    )
    assert found == pytest.approx(expected)


@UNITS
def test_of_inputs_and_gaps(s: float) -> None:
    W, mean, cov = moments()
    one = refit.GapMoments(mean, cov, W[:, 0], W @ cov, 1.0)
    other = refit.GapMoments(s * mean, s**2 * cov, W[:, 0], s * W @ cov, 1.0)
    fits = [refit.fit_gap(given, 1e-3) for given in (one, other)]
    torch.testing.assert_close(s * fits[1].R, fits[0].R)
    torch.testing.assert_close(fits[1].c, fits[0].c)


@UNITS
def test_of_redundant_channels(s: float) -> None:
    (_, _, cov), (_, _, scaled) = moments(), moments(s)
    assert redundancy.redundancy(scaled) == pytest.approx(redundancy.redundancy(cov))
