"""Sums of inputs and gaps against moments over all tokens, with weights for those that are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.numerics.refit import GapMoments
from corp.surgery.refit import gaps
from corp.surgery.refit.gaps import GapSums, TokenSums
from tests.helpers.seeds import seeded

N, D, OUT = 40, 6, 3


def tokens(number: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs with a large mean, and gaps that follow them."""
    draw = seeded(number)
    x = torch.randn(N, D, generator=draw, dtype=torch.float64) + 10 * torch.arange(D)
    noise = torch.randn(N, OUT, generator=draw, dtype=torch.float64)
    return x, x[:, :OUT] + noise + torch.arange(OUT)


def by_hand(x: Tensor, gap: Tensor, weight: Tensor, intercept: bool) -> GapMoments:
    """Weighted moments of all tokens."""
    weight = weight.double()[:, None] / float(weight.double().sum())
    mean, behind = (weight * x).sum(0), (weight * gap).sum(0)
    if not intercept:
        mean, behind = torch.zeros_like(mean), torch.zeros_like(behind)
    y, g = x - mean, gap - behind
    return GapMoments(mean, y.mT @ (weight * y), behind, g.mT @ (weight * y), float((weight * g.square()).sum()))


def assert_equal(found: GapMoments, expected: GapMoments) -> None:
    for one, other in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert found.energy == pytest.approx(expected.energy)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_moments_are_those_of_all_tokens(intercept: bool, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "CHUNK", 7)
    x, gap = tokens()
    sums = GapSums(D, OUT)
    for some, behind in zip(x.chunk(parts), gap.chunk(parts), strict=True):
        sums.update(some, behind)
    sums.update(x[:0], gap[:0])
    assert sums.n == N
    assert sums.square == pytest.approx(float(gap.square().sum()))
    assert_equal(sums.moments(intercept), by_hand(x, gap, torch.ones(N), intercept))


def test_sums_of_parts_add_up() -> None:
    x, gap = tokens()
    first, second = GapSums(D, OUT), GapSums(D, OUT)
    first.update(x[:15], gap[:15])
    second.shift = first.shift
    second.update(x[15:], gap[15:])
    both = first + second
    assert (both.n, both.square) == (N, pytest.approx(first.square + second.square))
    assert_equal(both.moments(True), by_hand(x, gap, torch.ones(N), True))


def test_single_precision_is_summed_without_losing_a_small_variance() -> None:
    x, gap = tokens()
    sums = GapSums(D, OUT)
    sums.update((x + 1000).float(), gap.float())
    expected = by_hand((x + 1000).float().double(), gap.float().double(), torch.ones(N), True)
    torch.testing.assert_close(sums.moments(True).cov, expected.cov, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_tokens_that_are_read_have_their_share_of_the_weight(intercept: bool, share: float) -> None:
    x, gap = tokens()
    read = torch.arange(N) % 5 == 0
    parts = [TokenSums(D, OUT, share) for _ in range(2)]
    for sums, rows in zip(parts, (torch.arange(N) < 20, torch.arange(N) >= 20), strict=True):
        sums.shift_by(x.mean(0))
        sums.update(x, gap, read & rows, ~read & rows)
    both = parts[0] + parts[1]
    assert (both.n, both.share) == (N, share)
    assert both.square == pytest.approx(float(gap.square().sum()))
    weight = torch.where(read, share / read.sum(), (1 - share) / (~read).sum())
    assert_equal(both.moments(intercept), by_hand(x, gap, weight, intercept))


@pytest.mark.parametrize("every", [True, False])
def test_tokens_of_one_kind_alone_have_all_the_weight(every: bool) -> None:
    x, gap = tokens()
    sums = TokenSums(D, OUT, 0.5)
    chosen = torch.full((N,), every)
    sums.update(x, gap, chosen, ~chosen)
    assert_equal(sums.moments(True), by_hand(x, gap, torch.ones(N), True))
