"""The widths that a recipe leaves: shares, multiples, pairs, floors and equal heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corp.errors import PlanError, RecipeError
from corp.planning.floors import raised
from corp.planning.widths import narrowed, not_found, require_prunable, rotated_part, rounded_away, width_of
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, Refusal, Rotary, Rows, Sites, ValueSite

MLP = MLPSite("b.0.mlp", (Rows("b.0.mlp.up", 0, 1000),), "b.0.mlp.down")


def attention(width: int, rotated: int = 0, least: int = 0, name: str = "b.0.attn") -> AttentionSite:
    """Two heads of this width, of which the first dimensions are rotated."""
    rows = Rows(f"{name}.q", 0, 2 * width), Rows(f"{name}.k", 0, 2 * width)
    return AttentionSite(name, *rows, 2, None, rotary=Rotary(rotated) if rotated else None, least=least)


def values(width: int) -> ValueSite:
    return ValueSite("b.0.attn.values", Rows("b.0.attn.v", 0, 2 * width), 2, "b.0.attn.o", "b.0.attn", None)


@pytest.mark.parametrize(
    ("rotated", "sparsity", "multiple", "expected"),
    [
        (0, 0.5, 1, 32),
        (0, 0.3, 1, 45),
        (0, 0.3, 4, 48),
        (64, 0.3, 1, 46),  # 22.4 pairs are 23
        (64, 0.3, 4, 48),
        (64, 0.3, 3, 48),  # 24 pairs, a multiple of 2
        (16, 0.5, 1, 32),  # 4 pairs and 24 others
        (16, 0.3, 1, 46),  # 6 pairs and 34 others
    ],
)
def test_rotated_dimensions_go_in_pairs(rotated: int, sparsity: float, multiple: int, expected: int) -> None:
    assert narrowed(attention(64, rotated), sparsity, multiple) == expected


@pytest.mark.parametrize(("least", "expected"), [(0, 20), (16, 20), (40, 40), (64, 64)])
def test_no_head_goes_below_its_floor(least: int, expected: int) -> None:
    site = attention(64, 64, least)
    assert narrowed(site, 0.7) == expected
    told = raised(Sites([site]), Recipe(attn=0.7, round_to=1))
    assert len(told) == (expected > 20)
    assert all(f"keeps {expected} of 64 dimensions per head instead of 20" in note for note in told)
    assert raised(Sites([site]), Recipe(target_macs=0.5)) == []


def test_heads_that_keep_more_than_asked_are_counted() -> None:
    sites = Sites([attention(64, 64, 40, f"b.{i}.attn") for i in range(3)])
    (told,) = raised(sites, Recipe(attn=0.7, round_to=1))
    assert told.startswith("b.0.attn keeps 40")
    assert told.endswith("2 other attentions keep more than was asked for too")
    (one,) = raised(Sites([attention(64, 64, 40)]), Recipe(attn=0.7, round_to=1))
    assert "other" not in one


def test_rotated_and_other_dimensions_lose_the_same_share() -> None:
    site = attention(64, 16)
    for keep in range(3, 65):
        rotated = rotated_part(site, keep)
        assert rotated % 2 == 0
        assert rotated < keep  # of the others one is left at least
        assert keep * 16 / 64 <= rotated < keep * 16 / 64 + 2 or rotated == 2 * ((keep - 1) // 2)
    assert rotated_part(site, 32) == 8
    assert rotated_part(site, 33) == 10
    assert rotated_part(attention(64, 60), 4) == 2
    assert rotated_part(attention(64, 64), 10) == 10


def test_widths_are_rounded_up_and_heads_that_would_keep_almost_all_are_left_whole() -> None:
    sites = Sites([MLP, attention(64), values(64)])
    widths = [width_of(site, sites, Recipe(mlp=0.5, attn=0.3, vo=0.1)) for site in sites]
    assert widths == [504, 48, 64]  # multiples of 8, 4 and 4; 58 of 64 are more than 7/8
    at_least = [width_of(sites["b.0.attn.values"], sites, Recipe(vo=share)) for share in (0.125, 0.12)]
    assert at_least == [56, 64]
    assert width_of(sites["b.0.attn.values"], sites, Recipe(vo=0.1, round_to=1)) == 58
    assert width_of(sites["b.0.attn.values"], sites, Recipe(vo=0.1, round_to=4)) == 60
    assert width_of(MLP, sites, Recipe(mlp=0.1)) == 904  # an MLP is narrowed however little goes
    assert width_of(MLP, sites, Recipe(mlp=0.5, skip=["*.mlp"])) == 1000
    experts = replace(MLP, experts="b.0.experts")
    assert width_of(experts, sites, Recipe(mlp=0.499, round_to=1)) == 504
    assert width_of(experts, sites, Recipe(mlp=0.499, round_to=12)) == 504
    assert width_of(MLP, sites, Recipe(mlp=0.499, round_to=1)) == 501


def test_small_heads_are_not_rounded() -> None:
    sites = Sites([attention(32), values(32)])
    assert [width_of(site, sites, Recipe(attn=0.1, vo=0.1)) for site in sites] == [29, 29]


def test_what_is_lost_in_rounding_is_told() -> None:
    sites = Sites([attention(64), values(64)])
    (told,) = rounded_away(sites, Recipe(attn=0.1, vo=0.1))
    assert told.startswith("b.0.attn and 1 other sites keep their width of 64: 58 would be rounded up to it")
    (one,) = rounded_away(sites, Recipe(attn=0.1, vo=0.5))
    assert one.startswith("b.0.attn keep their width of 64")
    for silent in (Recipe(attn=0.5, vo=0.5), Recipe(attn=0.1, round_to=1), Recipe(attn=0.01, round_to=64)):
        assert rounded_away(sites, silent) == []
    assert rounded_away(sites, Recipe(target_macs=0.9)) == []


def test_equal_heads_are_as_wide_as_queries_and_no_wider_than_they_were() -> None:
    recipe = Recipe(attn=0.5, equal_heads=True)
    assert width_of(values(64), Sites([attention(64), values(64)]), recipe) == 32
    assert width_of(values(16), Sites([attention(64), values(16)]), recipe) == 16
    skipped = replace(recipe, skip=["*.values"])
    assert width_of(values(64), Sites([attention(64), values(64)]), skipped) == 64
    with pytest.raises(RecipeError, match=r"queries and keys of b\.0\.attn cannot be pruned"):
        width_of(values(64), Sites([values(64)]), recipe)


def test_shares_of_what_a_model_has_not_are_told() -> None:
    sites = Sites([MLP], [Refusal("b.0.attn", "attn", "odd")])
    assert not_found(sites, Recipe(mlp=0.5, attn=0.5)) == []
    assert not_found(sites, Recipe(mlp=0.5, vo=0.25)) == ["vo=0.25 changes nothing: no values were found in this model"]
    assert not_found(sites, Recipe(target_macs=0.5)) == []


def test_names_and_reasons_are_listed_up_to_a_few() -> None:
    refused = [Refusal(f"b.{i}.mlp", "mlp", "odd") for i in range(5)]
    with pytest.raises(PlanError, match=r"b\.2\.mlp \(mlp\): odd and 2 more"):
        require_prunable(Sites([], refused), Recipe(mlp=0.5))
    with pytest.raises(PlanError, match=r"b\.2\.mlp \(mlp\): odd$"):
        require_prunable(Sites([], refused[:3]), Recipe(mlp=0.5))
    with pytest.raises(PlanError, match=r"matches no site; they are called b\.0\.mlp, .*, b\.3\.mlp, \.\.\.$"):
        require_prunable(Sites([MLP], refused[1:]), Recipe(mlp=0.5, skip=["none.*"]))
    with pytest.raises(PlanError, match=r"they are called b\.0\.mlp, b\.1\.mlp, b\.2\.mlp, b\.3\.mlp$"):
        require_prunable(Sites([MLP], refused[1:4]), Recipe(mlp=0.5, skip=["none.*"]))
    with pytest.raises(PlanError, match=r"must be a corp\.Recipe, not dict"):
        require_prunable(Sites([MLP]), {"mlp": 0.5})  # type: ignore[arg-type]
