"""The least width of heads under QK-norm: their lengths are predicted within the limit, and with a pair less not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.numerics.lengths import length_features
from corp.planning.normed import LIMIT, NormedPairs, fit_lengths, least_width
from corp.recipe import Recipe
from corp.sites import AttentionSite, QKNorm, Rotary, Rows
from tests.helpers.seeds import seeded

HEADS, GROUPS, WIDTH, EPS = 4, 2, 16, 1e-6
RECIPE = Recipe.paper(attn=0.5)


def site() -> AttentionSite:
    rows = Rows("q", 0, HEADS * WIDTH), Rows("k", 0, GROUPS * WIDTH)
    norm = QKNorm("q_norm", "k_norm", EPS)
    return AttentionSite("attn", *rows, HEADS, None, kv_heads=GROUPS, rotary=Rotary(WIDTH), norm=norm)


def tokens(number: int, noise: float) -> tuple[Tensor, Tensor]:
    """Queries (H, n, d) and keys (K, n, d): a size that all dimensions of a head share, times noise of each."""
    draw = seeded(number)
    size = torch.randn(HEADS + GROUPS, 500, 1, generator=draw, dtype=torch.float64).exp()
    own = noise * torch.randn(HEADS + GROUPS, 500, WIDTH, generator=draw, dtype=torch.float64)
    x = size * own.exp()
    return x[:HEADS], x[HEADS:]


def sums_of(q: Tensor, k: Tensor) -> PairSums:
    sums = PairSums(HEADS, GROUPS, WIDTH, normed=True)
    features = length_features(q, EPS)[None], length_features(k, EPS)[None]
    sums.update(q[None], k[None], scale=0.0, features=features)  # every key gets the same attention
    return sums


def worst_error(seen: PairSums, unseen: tuple[Tensor, Tensor], part: NormedPairs) -> float:
    """The largest error of a head's length, of all heads: half of the root mean square of s' / s - 1 over tokens."""
    q, k = unseen
    found = []
    for g in range(GROUPS):
        dims = torch.tensor(part.kept(g))
        lengths = fit_lengths(seen, g, dims, EPS, RECIPE.ridge)
        shared = HEADS // GROUPS
        for x, fit in zip([*q[g * shared : (g + 1) * shared], k[g]], [*lengths.q, lengths.k], strict=True):
            predicted = x[:, dims].square() @ fit.v / WIDTH + fit.c
            found.append(0.5 * float((predicted / (x.square().mean(1) + EPS) - 1).square().mean().sqrt()))
    return max(found)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.45, 3.0])
@pytest.mark.parametrize("held", [True, False])
def test_the_least_width_is_within_the_limit_and_a_pair_less_is_not(noise: float, held: bool) -> None:
    q, k = tokens(1, noise)
    fitted, other = sums_of(q, k), tokens(2, noise)
    sums = SiteSums(fitted, sums_of(*other) if held else fitted.empty())
    width = least_width(site(), sums, RECIPE)
    errors = {
        keep: worst_error(fitted, other if held else (q, k), NormedPairs(sums, keep // 2, RECIPE, EPS))
        for keep in (width, width - 2)
        if keep
    }
    assert errors[width] <= LIMIT
    assert width == 2 or errors[width - 2] > LIMIT


def test_the_noisier_heads_are_the_more_they_keep() -> None:
    sums = [SiteSums(s, s.empty()) for s in (sums_of(*tokens(1, noise)) for noise in (0.0, 0.1, 0.45, 3.0))]
    found = [least_width(site(), one, RECIPE) for one in sums]
    assert found[0] == 2
    assert found == sorted(found)
    assert 2 < found[2] < WIDTH
    assert found[-1] == WIDTH
