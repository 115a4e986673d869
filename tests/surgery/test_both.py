"""Where the rows of narrowed attentions are, whether projections are separate, packed, or keep their dense code."""

from __future__ import annotations

import pytest
from torch import nn

from corp.calibration.statistics import Statistics
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, Rows, Sites, ValueSite
from corp.surgery.both import Both
from corp.surgery.padded import Padded

HEADS, GROUPS, WIDTH = 4, 2, 4
Q, K, V = 16, 8, 8  # rows of the dense attention
MLP = MLPSite("mlp", (Rows("mlp.up", 0, 8),), "mlp.down")


def both(rows: dict[str, Rows], heights: dict[str, int], keep: dict[str, int], *, queries: bool = True) -> Both:
    """Both models of one attention; `heights` are the rows of the pruned layers."""
    padded = Padded(rows["q"], rows["k"], rows["v"], HEADS, GROUPS, None)
    sites: list[AttentionSite | ValueSite] = []
    if queries:
        sites.append(AttentionSite("a", rows["q"], rows["k"], HEADS, None, kv_heads=GROUPS))
    sites.append(ValueSite("a.values", rows["v"], HEADS, "o", "a", padded, kv_heads=GROUPS))
    pruned = nn.ModuleDict({name: nn.Linear(3, height) for name, height in heights.items()})
    plans = tuple(
        SitePlan(name, "attn" if name == "a" else "vo", WIDTH, 0.5, (tuple(range(width)),) * GROUPS, False, ())
        for name, width in keep.items()
    )
    return Both(nn.Module(), pruned, Sites(sites), Statistics(), Plan(Recipe(), plans))


def places(found: dict[str, Rows] | None) -> dict[str, tuple[str, int, int]] | None:
    return found and {letter: (rows.module, rows.start, rows.stop) for letter, rows in found.items()}


APART = {"q": Rows("q", 0, Q), "k": Rows("k", 0, K), "v": Rows("v", 0, V)}
PACKED = {"v": Rows("x", 0, V), "q": Rows("x", V, V + Q), "k": Rows("x", V + Q, V + Q + K)}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, {"q": 16, "k": 8, "v": 8}),
        ({"a": 2}, {"q": 8, "k": 4, "v": 8}),
        ({"a.values": 3}, {"q": 16, "k": 8, "v": 6}),
        ({"a": 1, "a.values": 3}, {"q": 4, "k": 2, "v": 6}),
    ],
)
def test_rows_follow_each_other_in_their_dense_order(keep: dict[str, int], expected: dict[str, int]) -> None:
    made = both(APART, expected, keep)
    for site in made.sites:
        assert places(made.rows(site)) == {letter: (letter, 0, height) for letter, height in expected.items()}
    v, q, k = expected["v"], expected["q"], expected["k"]
    packed = both(PACKED, {"x": v + q + k}, keep)
    for site in packed.sites:
        assert places(packed.rows(site)) == {"v": ("x", 0, v), "q": ("x", v, v + q), "k": ("x", v + q, v + q + k)}


def test_layers_of_another_height_are_not_corps_own() -> None:
    made = both(PACKED, {"x": 33}, {})
    assert made.rows(made.sites["a"]) is None
    assert made.rows(MLP) is None


def test_refused_queries_keep_their_rows_in_the_layer_of_values() -> None:
    made = both(PACKED, {"x": 6 + Q + K}, {"a.values": 3}, queries=False)
    assert places(made.rows(made.sites["a.values"])) == {
        "v": ("x", 0, 6), "q": ("x", 6, 6 + Q), "k": ("x", 6 + Q, 6 + Q + K),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "weighted"),
    [
        (Recipe(), True),
        (Recipe(rank="combined"), True),  # which ranks MLP channels
        (Recipe.paper(), False),
        (Recipe.paper(rank="exact"), True),
    ],
)
def test_all_but_the_paper_weight_errors_by_attention(recipe: Recipe, weighted: bool) -> None:
    made = Both(nn.Module(), nn.Module(), Sites([]), Statistics(), Plan(recipe, ()))
    assert made.weighted is weighted
