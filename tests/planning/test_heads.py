"""What planning makes of query and key heads, and what a plan's file may leave out."""

from __future__ import annotations

import torch

from corp.calibration.grams import Grams
from corp.calibration.site_sums import SiteSums
from corp.planning.heads import HeadSums, plan_attention
from corp.planning.plan import Plan
from corp.planning.site_plan import HeadMaps
from corp.recipe import Recipe
from corp.sites import AttentionSite, Rows
from tests.helpers.seeds import seeded

WIDTH, KEEP = 6, 3
PAPER = Recipe.paper(attn=0.5)  # dimensions as they are


def maps_of(kv_heads: int | None) -> HeadMaps:
    """The maps of two query heads, each with keys of its own or both with the same."""
    draw = seeded(1)
    q, k = torch.randn(2, 8, 20, 2 * WIDTH, generator=draw, dtype=torch.float64)
    if kv_heads == 1:
        k = k[..., :WIDTH].repeat(1, 1, 2)
    grams = Grams(2, WIDTH)
    grams.update(q, k)
    rows = Rows("q", 0, 2 * WIDTH), Rows("k", 0, (kv_heads or 2) * WIDTH)
    site = AttentionSite("attn", *rows, 2, None, kv_heads=kv_heads)
    fold = plan_attention(site, KEEP, HeadSums(None, SiteSums(grams, Grams(2, WIDTH))), PAPER).fold
    assert isinstance(fold, HeadMaps)
    return fold


def test_queries_and_keys_share_the_compensation_evenly() -> None:
    """What lower precision treats best: neither side is larger than the other."""
    fold = maps_of(None)
    for to_q, to_k in zip(fold.q, fold.k, strict=True):
        torch.testing.assert_close(torch.linalg.svdvals(to_q), torch.linalg.svdvals(to_k))
        assert float((to_q - to_k).norm()) > 1e-3  # there is something to compensate for


def test_keys_that_heads_share_stay_as_they_are() -> None:
    fold = maps_of(1)
    (to_k,) = fold.k
    torch.testing.assert_close(to_k @ to_k.mT, torch.eye(KEEP, dtype=to_k.dtype))
    assert int((to_k != 0).sum()) == KEEP
    assert len(fold.q) == 2


def test_a_plan_may_leave_out_where_it_came_from() -> None:
    whole = Plan(Recipe(mlp=0.5), ()).to_dict()
    short = {key: whole[key] for key in ("version", "recipe", "sites")}
    assert Plan.from_dict(short) == Plan(Recipe(mlp=0.5), ())
    assert (Plan.from_dict(short).samples, Plan.from_dict(short).weights) == (0, "")
