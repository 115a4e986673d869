"""Rotary pairs that all heads share, against logits computed one by one, and how long the planning of a site takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.calibration.statistics import Statistics
from corp.planning.planners import cost_of, pairs_of_all
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, Rotary, Rows, ValueSite
from tests.helpers.seeds import seeded

PAIRS, HEADS = 4, 2
NAMES = ("a", "b", "c")
SCALE = 0.5


class Layer(NamedTuple):
    """Rotated queries (B, H, n, d) and keys (B, K, n, d) of one attention."""

    q: Tensor
    k: Tensor

    def products(self) -> Tensor:
        """The parts x (p) and y (p) of every logit (H, B, m, n, 2p): x adds up to the logit, y is its other phase."""
        k = self.k.repeat_interleave(HEADS // self.k.shape[1], 1)
        (q1, q2), (k1, k2) = (part.transpose(0, 1).chunk(2, -1) for part in (self.q, k))
        q1, q2, k1, k2 = q1[:, :, :, None], q2[:, :, :, None], k1[:, :, None], k2[:, :, None]
        return torch.cat([q1 * k1 + q2 * k2, q2 * k1 - q1 * k2], -1)


def layer(number: int, kv_heads: int, strength: list[float], size: float) -> Layer:
    """Random queries and keys whose pairs differ in strength."""
    draw, width = seeded(number), torch.tensor(strength, dtype=torch.float64).repeat(2) * size
    q = torch.randn(3, HEADS, 12, 2 * PAIRS, generator=draw, dtype=torch.float64) * width
    return Layer(q, torch.randn(3, kv_heads, 12, 2 * PAIRS, generator=draw, dtype=torch.float64))


LAYERS = {  # the strong layer prefers other pairs than the two weak ones
    "a": layer(1, 2, [0.8, 0.3, 1.4, 0.3], 10.0),
    "b": layer(2, 1, [0.2, 1.0, 0.9, 0.8], 0.1),
    "c": layer(3, 2, [0.2, 0.8, 1.2, 0.9], 0.1),
}


def site(name: str, groups: int = 1, plain: int = 0) -> AttentionSite:
    width = 2 * PAIRS + plain
    rows = Rows(f"{name}.q", 0, HEADS * width), Rows(f"{name}.k", 0, groups * width)
    return AttentionSite(name, *rows, HEADS, None, kv_heads=groups, rotary=Rotary(2 * PAIRS))


def statistics(layers: Mapping[str, Layer] = LAYERS) -> Statistics:
    sums = {}
    for name, (q, k) in layers.items():
        made = PairSums(HEADS, k.shape[1], 2 * PAIRS)
        made.update(q, k, scale=SCALE)
        sums[name] = SiteSums(made, made.empty())
    return Statistics(sums)


SITES = [site(name, LAYERS[name].k.shape[1]) for name in NAMES]
WIDTHS = dict.fromkeys(NAMES, 6)


def cost_without(names: tuple[str, ...], pair: int) -> float:
    """The smallest error of all heads' logits without a pair, under their attention and up to a constant per row.

    Every head counts by the share of its logits that is lost, weighted likewise.
    """
    total = 0.0
    left = [i for i in range(2 * PAIRS) if i % PAIRS != pair]
    for name in names:
        for parts in LAYERS[name].products():  # (B, m, n, 2p)
            logits = parts[..., :PAIRS].sum(-1)
            attention = (SCALE * logits).softmax(-1)[..., None]
            centred = attention.sqrt() * (parts - (attention * parts).sum(-2, keepdim=True))
            rows = centred.flatten(0, 2)
            target = rows[:, :PAIRS].sum(1)
            fit = torch.linalg.lstsq(rows[:, left], target[:, None]).solution
            total += float((rows[:, left] @ fit - target[:, None]).square().sum() / target.square().sum())
    return total


def test_all_heads_of_all_layers_choose_the_pairs_with_equal_weight() -> None:
    found = pairs_of_all(SITES, WIDTHS, statistics(), Recipe.paper(attn=0.25, rotary="shared"))
    worth = torch.zeros(PAIRS, dtype=torch.float64)
    for one in LAYERS.values():
        x = one.products()[..., :PAIRS]  # (H, B, m, n, p)
        worth += (x.square().sum((1, 2, 3)) / x.sum(-1).square().sum((1, 2, 3))[:, None]).sum(0)
    expected = sorted(worth.argsort(descending=True)[:3].tolist())
    assert {name: pairs.tolist() for name, pairs in found.items()} == dict.fromkeys(NAMES, expected)
    assert expected == [1, 2, 3]  # the strong layer alone would keep pair 0


@pytest.mark.parametrize(
    ("recipe", "lost"),
    [
        (Recipe(), 0),
        (Recipe(rank="combined"), 0),  # which ranks MLP channels
        (Recipe.paper(), 3),
    ],
)
def test_only_the_paper_shares_a_strong_pair_that_attention_does_not_notice(recipe: Recipe, lost: int) -> None:
    """All keys have the same pair 0, so it adds a constant to every row of logits, which softmax ignores."""
    q, k = layer(1, 2, [5.0, 1.0, 1.0, 0.5], 1.0)
    k[..., [0, PAIRS]] = 1.0
    found = pairs_of_all(SITES[:1], WIDTHS, statistics({"a": Layer(q, k)}), replace(recipe, attn=0.25, rotary="shared"))
    assert found["a"].tolist() == [pair for pair in range(PAIRS) if pair != lost]


def test_the_exact_choice_loses_least_after_refitting() -> None:
    found = pairs_of_all(SITES, WIDTHS, statistics(), Recipe(attn=0.25, rank="exact", rotary="shared"))
    costs = [cost_without(NAMES, pair) for pair in range(PAIRS)]
    lost = costs.index(min(costs))
    expected = [pair for pair in range(PAIRS) if pair != lost]
    assert {name: pairs.tolist() for name, pairs in found.items()} == dict.fromkeys(NAMES, expected)


def test_attentions_share_pairs_with_those_of_their_width_only() -> None:
    recipe = Recipe.paper(attn=0.25, rotary="shared")
    widths = {"a": 2, "b": 4, "c": 8}
    found = pairs_of_all(SITES, widths, statistics(), recipe)
    assert {name: len(pairs) for name, pairs in found.items()} == {"a": 1, "b": 2}  # c keeps its width
    assert found["a"].tolist() == pairs_of_all(SITES[:1], widths, statistics(), recipe)["a"].tolist() == [2]
    assert pairs_of_all(SITES, widths, statistics(), replace(recipe, rotary="free")) == {}


def test_sites_without_rotation_have_no_pairs_to_share() -> None:
    mlp = MLPSite("m", (Rows("m.up", 0, 8),), "m.down")
    plain = replace(site("p"), rotary=None)
    recipe = Recipe.paper(attn=0.25, rotary="shared")
    assert set(pairs_of_all([mlp, plain, SITES[0]], {"m": 4, "p": 4, "a": 6}, statistics(), recipe)) == {"a"}


@pytest.mark.parametrize("samples", [1, 7])
def test_planning_takes_time_with_the_cube_of_the_width_and_per_head_and_sample(samples: int) -> None:
    plain = replace(site("p"), rotary=None)
    rows = Rows("p.q", 0, 2 * HEADS * plain.width), Rows("p.k", 0, 2 * plain.width)
    wide = replace(plain, q=rows[0], k=rows[1])
    assert cost_of(wide, samples) == pytest.approx(8 * cost_of(plain, samples))
    assert cost_of(plain, 3 * samples) == pytest.approx(3 * cost_of(plain, samples))
    assert cost_of(replace(wide, heads=2 * HEADS), samples) == pytest.approx(2 * cost_of(plain, samples))
    rotated, mixed = site("r"), site("r", plain=2 * PAIRS)
    assert cost_of(rotated, samples) == cost_of(rotated, 1) > 0
    assert cost_of(mixed, samples) == pytest.approx(cost_of(plain, samples) + cost_of(rotated, samples))
    values = ValueSite("v", Rows("v.v", 0, 8), 2, "v.o", "v", None)
    assert [cost_of(one, samples) for one in (MLPSite("m", (Rows("m.up", 0, 8),), "m.down"), values)] == [512.0, 512.0]
