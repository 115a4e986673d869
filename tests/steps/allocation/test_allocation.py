"""Budgets allocated over a model's sites: never exceeded, never out of reach where equal shares are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

import corp
from corp import CorpError, Recipe
from corp.api import estimate
from corp.cli.expand import _override
from corp.io.observer import Advance, Observer
from corp.planning.plan import Plan
from corp.steps.allocation.allocator import Allocation, Allocator, Way
from corp.steps.allocation.budget import narrowest
from corp.steps.allocation.curves import Curve, comparable, usual_power
from corp.steps.allocation.split import SPREADS, Split
from corp.steps.allocation.trials import Trials
from tests.helpers.models import batches, build

FIRST, SECOND = "blocks.0.mlp", "blocks.1.mlp"


@pytest.fixture(scope="module")
def vit() -> Allocator:
    model = build("vit")
    return Allocator(model, corp.find_sites(model), corp.calibrate(model, batches("vit")), Recipe())


def under(made: Allocator, recipe: Recipe) -> Allocator:
    """An allocator of the same model under another recipe."""
    return Allocator(made.model, made.sites, made.stats, recipe)


def test_an_allocation_does_not_depend_on_those_before_it(vit: Allocator) -> None:
    recipe = Recipe(target_macs=0.7)
    made, even = under(vit, recipe), replace(recipe, allocate="uniform")
    first = made.allocate(even)
    made.allocate(recipe)
    again = made.allocate(even)
    assert first.widths == again.widths
    assert first.paths.keys() == again.paths.keys() != set()
    assert all(torch.equal(first.paths[name].order, again.paths[name].order) for name in first.paths)
    assert under(vit, even).allocate(even).paths == {}  # its recipe needs none


def cost(made: Allocator, widths: Mapping[str, int]) -> float:
    budget = made.budget("macs", 1.0)
    return budget.cost(made.sites, widths) / budget.dense


@pytest.mark.parametrize("changes", [{}, {"round_to": 8}, {"equal_heads": True}, {"skip": "blocks.0.*"}])
def test_a_budget_is_met_wherever_equal_shares_meet_it(changes: dict, vit: Allocator) -> None:
    asked = Recipe(target_macs=1.0, **changes)
    made = under(vit, asked)
    least = narrowest(made.sites, asked, made.budget("macs", 1.0))
    for target in (0.97, 0.8, 0.6, 0.4, least):
        wanted = max(target, least)
        widths = made.allocate(replace(asked, target_macs=wanted)).widths
        assert cost(made, widths) <= wanted
    with pytest.raises(CorpError, match="out of reach"):
        made.allocate(replace(asked, target_macs=least - 1e-3))


def first_matters_less(made: Allocator) -> Allocator:
    """An allocator of the same model that takes nearly all from the first MLP."""
    curves = {name: curve._replace(energy=1e6 if name == FIRST else 1.0) for name, curve in made.curves().items()}
    return Allocator(made.model, made.sites, made.stats, made.recipe, curves=curves)


@pytest.mark.parametrize("spread", [2.0, 1.5, 1.25, 1.0])
def test_no_mlp_loses_more_than_its_spread(spread: float, vit: Allocator) -> None:
    recipe = Recipe(target_macs=0.7, round_to=1)
    vit = first_matters_less(vit)
    free, bound = vit.allocate(recipe), vit.allocate(recipe, Way(spread=spread))
    most = spread * bound.why["allocation"]["equal_share"]
    lost = {name: 1 - bound.widths[name] / 96 for name in (FIRST, SECOND)}
    assert max(lost.values()) <= most + 1 / 96
    assert cost(vit, bound.widths) <= 0.7
    assert bound.widths != free.widths


class Judged(Split):
    """A split whose models are judged by a rule: how far the MLPs differ from some width."""

    def __init__(self, allocator: Allocator, recipe: Recipe, best: int) -> None:
        unused: Any = None
        super().__init__(Trials(allocator, recipe, unused, 0, unused))
        self.best = best

    def measure(self, found: Allocation) -> float:
        return float(max(abs(found.widths[name] - self.best) for name in (FIRST, SECOND)))


def test_a_narrower_spread_is_used_where_its_model_is_nearer(vit: Allocator) -> None:
    recipe = Recipe(target_macs=0.7, round_to=1)
    vit = first_matters_less(vit)
    free = vit.allocate(recipe)
    way = Way(free.why["allocation"]["queries"], free.why["allocation"]["power"])
    widths = [free.widths[name] for name in (FIRST, SECOND)]
    assert min(widths) < max(widths)
    assert Judged(vit, recipe, sum(widths) // 2).best_spread(way).spread is not None
    apart = Judged(vit, recipe, min(widths) - 50)  # the farther apart, the better: nothing is gained
    apart.measure = lambda found: -abs(found.widths[FIRST] - found.widths[SECOND])  # type: ignore[method-assign]
    assert apart.best_spread(way) == way


@pytest.mark.parametrize(("closer", "taken"), [(0.97, 0), (0.90, 1)])
def test_another_way_to_weight_errors_is_used_only_if_its_model_is_clearly_closer(
    closer: float, taken: int, vit: Allocator
) -> None:
    recipe = Recipe(target_macs=0.7, round_to=1)
    ways = [Way(0.2, 0.5), Way(0.5, 0.5)]
    first, second = (vit.allocate(recipe, way).widths for way in ways)
    assert first != second
    judged = Judged(vit, recipe, 0)
    judged.measure = lambda found: 1.0 if found.widths == first else closer  # type: ignore[method-assign]
    assert judged.best_of(ways) == ways[taken]


def test_measured_rates_and_the_energy_of_the_stream_weight_errors_alike() -> None:
    curves = {"a": Curve(torch.tensor([8.0, 0.0]), 4.0), "b": Curve(torch.tensor([8.0, 0.0]), 16.0)}
    by_energy = comparable(curves, 1.0, None)
    assert float(by_energy["a"][0] / by_energy["b"][0]) == pytest.approx(4.0)
    both = comparable(curves, 1.0, {"a": 9.0, "b": 1.0})  # 9 times as much by the rates, 4 times by the energy
    assert float(both["a"][0] / both["b"][0]) == pytest.approx(6.0)
    alone = comparable(curves, None, {"a": 9.0, "b": 1.0})
    assert float(alone["a"][0] / alone["b"][0]) == pytest.approx(9.0)


@pytest.mark.parametrize(("divergence", "taken"), [(1.02, SPREADS[-1]), (1.05, None)])
def test_of_models_that_are_about_equally_near_the_more_even_one_is_used(
    divergence: float, taken: float | None, vit: Allocator
) -> None:
    recipe = Recipe(target_macs=0.7, round_to=1)
    vit = first_matters_less(vit)
    free = vit.allocate(recipe)
    way = Way(free.why["allocation"]["queries"], free.why["allocation"]["power"])
    judged = Judged(vit, recipe, 0)
    judged.measure = lambda found: 1.0 if found.widths == free.widths else divergence  # type: ignore[method-assign]
    assert judged.best_spread(way).spread == taken


def test_the_share_of_queries_follows_the_budget(vit: Allocator) -> None:
    removed = [
        vit.allocate(Recipe(target_macs=target)).why["allocation"]["removed"]["attn"]
        for target in (0.95, 0.8, 0.6, 0.45)
    ]
    assert removed == sorted(removed)
    assert removed[0] <= 0.25 < 0.45 < removed[-1] < 0.8


def test_another_recipe_has_other_curves(vit: Allocator) -> None:
    skipping = Recipe(target_macs=0.8, skip=["blocks.0.*"])
    assert under(vit, skipping).allocate(skipping).widths["blocks.0.mlp"] == 96
    assert vit.allocate(Recipe(target_macs=0.8)).widths["blocks.0.mlp"] < 96


def test_where_the_stream_grows_errors_count_relative_to_it() -> None:
    model = build("vit")
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight *= 40
    recipe = Recipe(target_macs=0.7)
    made = Allocator(model, corp.find_sites(model), corp.calibrate(model, batches("vit")), recipe)
    by_rule, absolute, relative = (made.allocate(recipe, Way(power=power)) for power in (None, 0.0, 1.0))
    assert by_rule == relative
    assert absolute.widths[SECOND] > relative.widths[SECOND]
    assert usual_power({str(energy): Curve(torch.zeros(2), energy) for energy in (50.0, 200.0)}) == 0.5


def test_queries_may_be_told_and_what_leaves_no_room_for_the_rest_is_not_taken(vit: Allocator) -> None:
    recipe = Recipe(target_macs=0.7)
    told = vit.allocate(recipe, Way(queries=0.5))
    assert {told.widths[site.name] for site in vit.sites.attention} == {4}  # of 8
    assert told.why["allocation"]["queries"] == 0.5
    least = narrowest(vit.sites, recipe, vit.budget("macs", 1.0))  # values keep their width under equal shares
    tight = Recipe(target_macs=least + 0.01, overrides={"*": {"vo": 0.0}})
    instead = vit.allocate(tight, Way(queries=0.0)).why["allocation"]
    assert instead["queries"] == instead["equal_share"] > 0.9


@pytest.mark.parametrize("allocate", ["uniform", "gain"])
def test_ranges_bound_what_a_target_may_choose(allocate: str, vit: Allocator) -> None:
    free = vit.allocate(Recipe(allocate=allocate, target_macs=0.68)).widths
    bounds = {"blocks.0.*": {"mlp": (0.0, 0.1)}, "blocks.1.*": {"mlp": [0.8, 0.9], "attn": (0.0, 0.25)}}
    recipe = Recipe(allocate=allocate, target_macs=0.68, overrides=bounds)
    widths = vit.allocate(recipe).widths
    width = vit.sites[FIRST].width  # 96
    assert widths[FIRST] >= 0.9 * width > free[FIRST]
    assert 0.1 * width <= widths[SECOND] <= 0.2 * width + 1
    assert widths["blocks.1.attn"] >= 6 > free["blocks.1.attn"]
    assert cost(vit, widths) <= 0.68


def test_ranges_are_checked_read_and_written() -> None:
    with pytest.raises(CorpError, match="allowed only under a target"):
        Recipe.paper(mlp=0.5, overrides={"blocks.0.*": {"mlp": (0.0, 0.3)}})
    for odd in ((0.3, 0.1), (0.1,), (0.1, 1.0)):
        with pytest.raises(CorpError, match=r"range of sparsities|not a share"):
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


def test_a_plan_says_who_got_what_and_keeps_it_on_disk(vit: Allocator, tmp_path) -> None:
    plan = corp.plan(vit.model, vit.stats, Recipe(target_macs=0.7))
    why = plan.why["allocation"]
    assert (why["budget"], why["target"], why["allocate"]) == ("macs", 0.7, "gain")
    kept = {site.name: site.keep for site in plan.sites}
    mlp = [kept.get(site.name, site.width) / site.width for site in vit.sites.mlp]
    assert why["removed"]["mlp"] == pytest.approx(1 - sum(mlp) / len(mlp))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert corp.plan(vit.model, vit.stats, Recipe.paper(mlp=0.5)).why == {}


@pytest.mark.parametrize("target", ["target_macs", "target_params"])
def test_a_target_out_of_reach_is_told_before_the_data_pass(target: str) -> None:
    seen: list[str] = []

    class Watch(Observer):
        def stage(self, name: str, total: int | None, unit: str) -> AbstractContextManager[Advance]:
            seen.append(name)
            return super().stage(name, total, unit)

    for call in (corp.prune, estimate):
        watch = {"observer": Watch()} if call is corp.prune else {}
        with pytest.raises(CorpError, match=f"{target}=0.01 is out of reach: .* still has 0.* of the dense model's"):
            call(build("vit"), batches("vit"), Recipe(**{target: 0.01}), **watch)
    assert seen == ["finding what can be pruned"]
