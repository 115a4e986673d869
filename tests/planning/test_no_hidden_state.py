"""Planning leaves nothing behind: plans of one calibration are what they would be alone, in any order."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import corp
from corp import Recipe, Statistics
from corp.planning.plan import Plan
from corp.planning.planners import plan_site
from corp.planning.site_plan import Fold, SitePlan
from corp.recipe import BASES, COMPENSATIONS, RANKINGS
from tests.helpers.models import as_saved, images, vit

SAVED = {"rtol": 1e-7, "atol": 1e-9}  # what was solved again differs by rounding


@pytest.fixture(scope="module")
def calibrated() -> tuple[nn.Module, Statistics]:
    model = vit(depth=1, embed_dim=12, num_heads=2, mlp_ratio=2.0).double()
    stats = corp.calibrate(model, images(3, 8))
    return model, dataclasses.replace(stats, inputs=None)  # operations need not be counted


SHARE = st.sampled_from((0.0, 0.25, 0.5))
HOW = {
    "rank": st.sampled_from(RANKINGS),
    "compensate": st.sampled_from(COMPENSATIONS),
    "intercept": st.sampled_from(("auto", True)),
    "ridge": st.sampled_from((1e-3, 1e-1)),
    "attn_basis": st.sampled_from(BASES),
    "vo_basis": st.sampled_from(BASES),
}
RECIPES = st.one_of(
    st.builds(Recipe, mlp=SHARE, attn=SHARE, vo=SHARE, **HOW),
    st.builds(Recipe, target_params=st.sampled_from((0.8, 0.9)), allocate=st.sampled_from(("gain", "uniform")), **HOW),
    st.just(Recipe(mlp=0.5, intercept=False)),
)


def require_independent(model: nn.Module, stats: Statistics, recipes: Sequence[Recipe], order: Sequence[int]) -> None:
    """Plan all on these statistics, apply in this order, and compare with fresh statistics for each."""
    pristine = copy.deepcopy(stats)
    plans = [corp.plan(model, stats, recipe) for recipe in recipes]
    made = {number: corp.apply(model, stats, plans[number]).model.state_dict() for number in order}
    for number, recipe in enumerate(recipes):
        fresh = copy.deepcopy(pristine)
        alone = corp.plan(model, fresh, recipe)
        assert alone == plans[number]
        assert alone.to_dict() == plans[number].to_dict()
        _require_equal(made[number], corp.apply(model, fresh, alone).model.state_dict(), rtol=0, atol=0)
        _require_equal(made[number], corp.apply(model, fresh, as_saved(alone)).model.state_dict(), **SAVED)


def _require_equal(found: dict[str, Any], expected: dict[str, Any], **close: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **close)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(data=st.data(), recipes=st.lists(RECIPES, min_size=2, max_size=3))
def test_any_plans_in_any_order(
    calibrated: tuple[nn.Module, Statistics], data: st.DataObject, recipes: list[Recipe]
) -> None:
    order = data.draw(st.permutations(range(len(recipes))))
    require_independent(*calibrated, recipes, order)


def test_a_subspace_that_is_not_compensated_then_one_that_is(calibrated: tuple[nn.Module, Statistics]) -> None:
    model, stats = calibrated
    none, full = (Recipe(attn=0.5, attn_basis="subspace", compensate=how) for how in ("none", "full"))
    first, second = corp.plan(model, stats, none), corp.plan(model, stats, full)
    assert first.sites[0].kept == second.sites[0].kept
    require_independent(model, stats, [none, full], [0, 1])
    corp.apply(model, stats, first)


def test_paths_with_and_without_an_intercept(calibrated: tuple[nn.Module, Statistics]) -> None:
    recipes = [Recipe(target_params=0.7, intercept=intercept) for intercept in (True, False, True)]
    require_independent(*calibrated, recipes, [2, 0, 1])


def test_the_property_can_fail(calibrated: tuple[nn.Module, Statistics], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning that remembers folds by site and width, as if they did not depend on the recipe."""
    folds: dict[tuple[str, int], Fold | None] = {}

    def remembering(model: Any, site: Any, keep: int, *rest: Any) -> SitePlan:
        made = plan_site(model, site, keep, *rest)
        return dataclasses.replace(made, fold=folds.setdefault((site.name, keep), made.fold))

    monkeypatch.setattr("corp.steps.plan.plan_site", remembering)
    monkeypatch.setattr("corp.steps.apply.require_agreement", lambda _findings: None)
    with pytest.raises(AssertionError):
        require_independent(*calibrated, [Recipe(mlp=0.5), Recipe(mlp=0.5, compensate="none")], [0, 1])


def test_a_plan_in_memory_is_equal_to_its_file(calibrated: tuple[nn.Module, Statistics]) -> None:
    plan: Plan = corp.plan(*calibrated, Recipe(mlp=0.5, attn=0.5, vo=0.5))
    assert all(site.fold is not None for site in plan.sites)
    assert "fold" not in plan.to_dict()["sites"][0]
    assert as_saved(plan) == plan
    assert all(site.fold is None for site in as_saved(plan).sites)
