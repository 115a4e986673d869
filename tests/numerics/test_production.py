"""Sums of float32 activations at the widths of production, against plain float64 references of every formula.

What is stated is what fits lose by it: the error of the fitted prediction, on the very data, against that of the best.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from corp.calibration.moments import Moments
from corp.numerics import affine, exact
from tests.helpers.seeds import seeded

Data = Callable[[int, int, torch.Generator], Tensor]  # tokens, channels -> (N, D)


def mixed(n: int, d: int, g: torch.Generator) -> Tensor:
    """Correlated channels, as a layer makes them of a narrower stream."""
    return torch.randn(n, d // 2, generator=g) @ torch.randn(d // 2, d, generator=g) / d**0.5


HARD: dict[str, Data] = {
    "correlated": lambda n, d, g: mixed(n, d, g) + 0.1 * torch.randn(n, d, generator=g),
    "means of a hundred deviations": lambda n, d, g: 100 + mixed(n, d, g) + 0.1 * torch.randn(n, d, generator=g),
    "condition number 1e10": lambda n, d, g: torch.randn(n, d, generator=g) * torch.logspace(0, -5, d),
    "duplicated channels": lambda n, d, g: mixed(n, d // 2, g).repeat(1, 2) + 3,
    "fewer tokens than channels": lambda n, d, g: torch.randn(d // 2, d, generator=g) + 1,
}


def plain_fit(x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Ridge regression of y on x, both centred, by stacking sqrt(weight) I under the data: slow, plain, float64."""
    eye = weight**0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    zero = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([x, eye]), torch.cat([y, zero]), driver="gelsd").solution.T


def sums_of(x: Tensor) -> Moments:
    """The moments of float32 tokens, batch by batch, as calibration takes them."""
    moments = Moments(x.shape[1])
    for part in x.split(500):
        moments.update(part)
    return moments


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("case", HARD)
def test_fits_from_float32_sums_lose_nothing_that_matters(case: str, width: int) -> None:
    """On the data itself the fit leaves at most a 1e-4th more error than the float64 reference, or a 1e-6th of all."""
    draw = seeded(3)
    x = HARD[case](2000, width, draw).float()
    W = torch.randn(40, width, generator=draw, dtype=torch.float64)
    moments = sums_of(x)
    kept, pruned = torch.arange(width // 2), torch.arange(width // 2, width)
    fit = affine.fit_affine(affine.removal(W, moments.mean, moments.cov(), kept, pruned), ridge=1e-3)
    true = x.double()
    centred, lost = true - true.mean(0), true[:, pruned] @ W[:, pruned].T
    weight = 1e-3 * float(centred.square().mean()) * len(true)
    V = plain_fit(centred[:, kept], lost - lost.mean(0), weight)
    c = lost.mean(0) - V @ true[:, kept].mean(0)
    ours, theirs = ((lost - true[:, kept] @ m.T - b).square().sum(1).mean() for m, b in ((fit.V, fit.c), (V, c)))
    everything = (lost - lost.mean(0)).square().sum(1).mean()
    assert float(ours - theirs) <= 1e-4 * float(theirs) + 1e-6 * float(everything)


@pytest.mark.parametrize("case", HARD)
def test_elimination_from_float32_sums_is_as_good_as_from_exact_ones(case: str) -> None:
    """The chosen half, judged by exact moments with the same ridge, is within 1 % of the half that those choose."""
    draw = seeded(4)
    x = HARD[case](2000, 64, draw).float()
    W = torch.randn(40, 64, generator=draw, dtype=torch.float64)
    true = x.double() - x.double().mean(0)
    cov = true.T @ true / len(x)
    left = []
    for sums in (sums_of(x).cov(), cov):
        kept, pruned = exact.elimination_path(W, sums, ridge=1e-3).keep(32)
        given = affine.removal(W, torch.zeros(64, dtype=torch.float64), cov, kept, pruned)
        left.append(affine.error(given, affine.fit_affine(given, ridge=1e-3)))
    everything = float((W @ cov * W).sum())
    assert left[0] <= 1.01 * left[1] + 1e-9 * everything


@pytest.mark.real
@pytest.mark.parametrize("case", HARD)
def test_the_same_at_the_width_of_a_large_mlp(case: str) -> None:
    test_fits_from_float32_sums_lose_nothing_that_matters(case, 3072)
