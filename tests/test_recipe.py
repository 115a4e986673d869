"""A recipe validates itself, and says what is wrong."""

import dataclasses
import json

import pytest

from corp import CorpError, Recipe
from corp.recipe import PRESETS, kept_width, preset_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": 1.0}, "mlp=1.0 is not a share"),
        ({"attn": -0.1}, "attn=-0.1 is not a share"),
        ({"mlp": float("nan")}, "not a share"),
        ({"mlp": "half"}, "not a share"),
        ({"mlp": True}, "not a share"),
        ({"rank": "best"}, "rank='best' is not one of"),
        ({"compensate": "some"}, "compensate='some' is not one of"),
        ({"intercept": "yes"}, "intercept='yes'"),
        ({"intercept": 1}, "intercept=1"),
        ({"compensate": "mean", "intercept": False}, "corrects the bias"),
        ({"ridge": -1.0}, "ridge=-1.0"),
        ({"ridge": float("inf")}, "ridge=inf"),
        ({"round_to": 0}, "round_to: 0"),
        ({"round_to": {"heads": 8}}, "unknown key.* heads; it takes head, mlp"),
        ({"skip": [3]}, "skip="),
        ({"overrides": {"blocks.0.*": {"mpl": 0.2}}}, "unknown key.* mpl"),
        ({"overrides": {"blocks.0.*": 0.2}}, "overrides"),
        ({"overrides": {"blocks.0.*": {"mlp": 1.5}}}, "not a share"),
    ],
)
def test_nonsense_is_refused_with_the_reason(changes: dict, message: str) -> None:
    with pytest.raises(CorpError, match=message):
        Recipe.paper(**changes)


def test_presets_fill_what_is_not_given() -> None:
    assert Recipe.paper(mlp=0.5) == Recipe.preset("paper", mlp=0.5, rank="combined", compensate="full")
    vbp = Recipe.preset("vbp")
    assert (vbp.rank, vbp.compensate) == ("variance", "mean")
    assert Recipe.preset("grail").intercept is False
    assert Recipe.preset("vbp", rank="magnitude").rank == "magnitude"
    with pytest.raises(CorpError, match="preset='magic' is not one of"):
        Recipe.preset("magic")


def test_the_defaults_are_the_best_and_all_fields_are_plain_values() -> None:
    recipe = Recipe(mlp=0.5)
    assert (recipe.rank, recipe.attn_basis, recipe.allocate, recipe.sequential) == ("exact", "subspace", "gain", "auto")
    assert recipe == Recipe.preset("best", mlp=0.5)
    assert "preset" not in recipe.to_dict()
    changed = dataclasses.replace(recipe, rank="combined")
    assert changed == Recipe(mlp=0.5, rank="combined")
    assert {**recipe.to_dict(), "rank": "combined"} == changed.to_dict()
    with pytest.raises(TypeError, match="preset"):
        dataclasses.replace(recipe, preset="best")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_settings(name: str) -> None:
    recipe = Recipe.preset(name, mlp=0.5, attn=0.25, skip="blocks.0.*", ridge=1e-2)
    assert preset_of(recipe) == name
    assert preset_of(Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))) == name
    assert preset_of(dataclasses.replace(recipe, rank="active")) == "custom"


def test_last_override_wins_and_other_kinds_keep_the_default() -> None:
    recipe = Recipe.paper(mlp=0.5, attn=0.4, overrides={"blocks.*": {"mlp": 0.3}, "blocks.1.*": {"mlp": 0.1}})
    assert recipe.sparsity("mlp", "blocks.0.mlp") == 0.3
    assert recipe.sparsity("mlp", "blocks.1.mlp") == 0.1
    assert recipe.sparsity("attn", "blocks.1.attn") == 0.4


def test_recipe_survives_json() -> None:
    recipe = Recipe.paper(mlp=0.5, round_to={"mlp": 64}, skip="blocks.0.*", overrides={"blocks.1.*": {"attn": 0.2}})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_unknown_fields_in_a_file_are_refused() -> None:
    with pytest.raises(CorpError, match=r"unknown recipe field.* nlp"):
        Recipe.from_dict({"nlp": 0.5})


@pytest.mark.parametrize(
    ("width", "sparsity", "multiple", "expected"),
    [
        (80, 0.3, 1, 56),
        (80, 0.7, 1, 24),
        (64, 0.1, 1, 58),
        (768, 0.5, 1, 384),
        (100, 0.5, 64, 64),
        (100, 0.3, 64, 100),
        (64, 0.0, 8, 64),
        (3, 0.99, 1, 1),
        (1000, 0.999999, 1, 1),
    ],
)
def test_kept_width_is_the_exact_ceiling(width: int, sparsity: float, multiple: int, expected: int) -> None:
    assert kept_width(width, sparsity, multiple) == expected


def test_wide_sites_are_rounded_by_default_and_small_ones_are_not() -> None:
    found = {width: Recipe().multiple("mlp", width) for width in (96, 511, 512, 3072)}
    assert found == {96: 1, 511: 1, 512: 8, 3072: 8}
    assert [Recipe().multiple(kind, width) for kind in ("attn", "vo") for width in (20, 64, 128)] == [1, 4, 8] * 2
    assert Recipe.paper().multiple("mlp", 3072) == Recipe(round_to=1).multiple("attn", 64) == 1
