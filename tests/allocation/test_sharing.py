"""Budgets shared out over a model's sites: never exceeded, never impossible where equal shares are not."""

from __future__ import annotations

import json

import pytest
import torch
from corp.allocation.allocate import Sharing, usual_power

import corp
from corp import CorpError, Recipe
from corp.allocation.budget import budget_of, narrowest
from corp.cli.recipes import _override
from corp.planning.plan import Plan
from corp.report.remake import command_line
from tests.helpers.models import batches, build

FIRST, SECOND = "blocks.0.mlp", "blocks.1.mlp"


@pytest.fixture(scope="module")
def sharing() -> Sharing:
    model = build("vit")
    return Sharing(model, corp.find_sites(model), corp.calibrate(model, batches("vit")))


def cost(sharing: Sharing, recipe: Recipe, widths: dict[str, int]) -> float:
    budget = budget_of(sharing.model, sharing.sites, recipe, sharing.stats.inputs)
    return budget.cost(sharing.sites, widths) / budget.dense


@pytest.mark.parametrize("target", [0.97, 0.8, 0.6, 0.4, "narrowest"])
@pytest.mark.parametrize("changes", [{}, {"round_to": 8}, {"equal_heads": True}, {"skip": "blocks.0.*"}])
def test_a_budget_is_met_wherever_equal_shares_meet_it(target: float | str, changes: dict, sharing: Sharing) -> None:
    asked = Recipe(target_macs=1.0, **changes)
    budget = budget_of(sharing.model, sharing.sites, asked, sharing.stats.inputs)
    least = narrowest(sharing.sites, asked, budget)
    wanted = least if target == "narrowest" else max(float(target), least)
    recipe = Recipe(target_macs=wanted, **changes)
    widths, _ = sharing.share(recipe)
    assert cost(sharing, recipe, widths) <= wanted
    with pytest.raises(CorpError, match="out of reach"):
        sharing.share(Recipe(target_macs=least - 1e-3, **changes))


def test_the_share_of_queries_follows_the_budget(sharing: Sharing) -> None:
    removed = [
        sharing.share(Recipe(target_macs=target)).why["sharing"]["removed"]["attn"] for target in (0.95, 0.8, 0.6, 0.45)
    ]
    assert removed == sorted(removed)
    assert removed[0] <= 0.25 < 0.45 < removed[-1] < 0.8


def test_another_recipe_has_other_curves(sharing: Sharing) -> None:
    skipping = sharing.share(Recipe(target_macs=0.8, skip=["blocks.0.*"]))
    assert skipping.widths["blocks.0.mlp"] == 96
    whole = sharing.share(Recipe(target_macs=0.8))
    assert whole.widths["blocks.0.mlp"] < 96


def test_where_the_stream_grows_errors_count_relative_to_it() -> None:
    model = build("vit")
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight *= 40
    stats = corp.calibrate(model, batches("vit"))
    sharing = Sharing(model, corp.find_sites(model), stats)
    recipe = Recipe(target_macs=0.7)
    by_rule, absolute, relative = (sharing.share(recipe, power=power) for power in (None, 0.0, 1.0))
    assert by_rule == relative
    assert absolute.widths[SECOND] > relative.widths[SECOND]
    assert usual_power([50.0, 200.0]) == 0.5


def test_queries_may_be_told_and_what_leaves_no_room_for_the_rest_is_not_taken(sharing: Sharing) -> None:
    recipe = Recipe(target_macs=0.7)
    told = sharing.share(recipe, 0.5)
    assert {told.widths[site.name] for site in sharing.sites.attention} == {4}  # of 8
    assert told.why["sharing"]["queries"] == 0.5
    budget = budget_of(sharing.model, sharing.sites, recipe, sharing.stats.inputs)
    least = narrowest(sharing.sites, recipe, budget)  # values keep their width under equal shares
    tight = Recipe(target_macs=least + 0.01, overrides={"*": {"vo": 0.0}})
    instead = sharing.share(tight, 0.0).why["sharing"]
    assert instead["queries"] == instead["equal_share"] > 0.9


@pytest.mark.parametrize("allocate", ["uniform", "gain"])
def test_ranges_bound_what_a_target_may_choose(allocate: str, sharing: Sharing) -> None:
    free = sharing.share(Recipe(allocate=allocate, target_macs=0.68)).widths
    bounds = {"blocks.0.*": {"mlp": (0.0, 0.1)}, "blocks.1.*": {"mlp": [0.8, 0.9], "attn": (0.0, 0.25)}}
    recipe = Recipe(allocate=allocate, target_macs=0.68, overrides=bounds)
    widths, _ = sharing.share(recipe)
    width = sharing.sites[FIRST].width  # 96
    assert widths[FIRST] >= 0.9 * width > free[FIRST]
    assert 0.1 * width <= widths[SECOND] <= 0.2 * width + 1
    assert widths["blocks.1.attn"] >= 6 > free["blocks.1.attn"]
    assert cost(sharing, recipe, widths) <= 0.68


def test_ranges_are_checked_read_and_written() -> None:
    with pytest.raises(CorpError, match="only a target makes"):
        Recipe.paper(mlp=0.5, overrides={"blocks.0.*": {"mlp": (0.0, 0.3)}})
    for odd in ((0.3, 0.1), (0.1,), (0.1, 1.0)):
        with pytest.raises(CorpError, match=r"range of sparsities|not a sparsity"):
            Recipe.paper(target_macs=0.5, overrides={"blocks.0.*": {"mlp": odd}})
    assert _override("a:b.*:mlp=0-0.3,attn=1e-3,vo=0.1-2e-1") == (
        "a:b.*",
        {"mlp": (0.0, 0.3), "attn": 1e-3, "vo": (0.1, 0.2)},
    )
    for odd in ("a:mlp=0.1-", "a:mlp=-0.5-", "a:mlp=x"):
        with pytest.raises(CorpError, match="--override"):
            _override(odd)
    recipe = Recipe.paper(target_macs=0.5, overrides={"blocks.0.*": {"mlp": (0.0, 0.3)}})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "blocks.0.*:mlp=0.0-0.3" in command_line("out", {"architecture": "vit"}, Plan(recipe, ()))


def test_a_plan_says_who_got_what_and_keeps_it_on_disk(sharing: Sharing, tmp_path) -> None:
    plan = corp.plan(sharing.model, sharing.stats, Recipe(target_macs=0.7))
    why = plan.why["sharing"]
    assert (why["budget"], why["target"], why["allocate"]) == ("macs", 0.7, "gain")
    kept = {site.name: site.keep for site in plan.sites}
    mlp = [kept.get(site.name, site.width) / site.width for site in sharing.sites.mlp]
    assert why["removed"]["mlp"] == pytest.approx(1 - sum(mlp) / len(mlp))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert corp.plan(sharing.model, sharing.stats, Recipe.paper(mlp=0.5)).why == {}
