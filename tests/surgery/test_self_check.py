"""The self-check: errors from the weights of a pruned model, what rounding explains, and damage that is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import corp
from corp import Recipe
from corp.errors import ModelError
from corp.sites import AttentionSite, module_of
from corp.surgery.self_check import Finding, require_agreement, verify
from tests.helpers import models, rotary_models

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
FAMILIES = ("vit", "no-biases", "hf-gpt2-cross", "llama", "phi")  # phi rotates half of a head's dimensions
RECIPES = {
    "paper": Recipe.paper(mlp=0.5, attn=0.5, vo=0.5, vo_basis="coordinates"),
    "full": Recipe(mlp=0.5, attn=0.5, vo=0.5, sequential=False),
}


def pruned(family: str, recipe: Recipe) -> tuple[Any, Any, corp.Statistics, corp.Plan]:
    if family in models.FAMILIES:
        model, data = models.build(family), models.batches(family, 2)
        stats = corp.calibrate(model, data, forward=models.call)
    else:
        model = rotary_models.build(family)
        stats = rotary_models.calibrate(model, rotary_models.batches())
    plan = corp.plan(model, stats, recipe)
    return model, corp.apply(model, stats, plan).model, stats, plan


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_give_the_errors_of_the_plan_and_damage_gives_others(family: str, how: str) -> None:
    """A projection of every site is damaged in turn; only sites of its own module disagree."""
    model, smaller, stats, plan = pruned(family, RECIPES[how])
    sites = corp.find_sites(model)
    found = verify(model, smaller, sites, stats, plan)
    assert [(one.site, one.kind) for one in found] == [(one.name, one.kind) for one in plan.sites]
    for one, site_plan in zip(found, plan.sites, strict=True):
        assert one.planned == pytest.approx(sum(cost.J for cost in site_plan.costs))
        assert one.found == pytest.approx(one.planned, rel=1e-4)
        assert one.energy == pytest.approx(sum(cost.energy for cost in site_plan.costs))
        assert one.agrees
    for site in sites:
        weight = smaller.get_submodule(site.q.module if isinstance(site, AttentionSite) else site.down).weight.data
        before = weight.clone()
        weight *= 1.1
        odd = {one.site for one in verify(model, smaller, sites, stats, plan) if not one.agrees}
        weight.copy_(before)
        assert site.name in odd
        assert {name for name in odd if not name.startswith(module_of(site))} == set()
    assert all(one.agrees for one in verify(model, smaller, sites, stats, plan))


@pytest.mark.parametrize(
    ("finding", "agrees"),
    [
        (Finding("a", "mlp", 0.5, 0.5, 1.0, 0.0), True),
        (Finding("a", "mlp", 0.5, 0.5 + 1e-6, 1.0, 0.0), True),
        (Finding("a", "mlp", 0.5, 0.5 + 1e-5, 1.0, 0.0), False),
        (Finding("a", "mlp", 0.5, 0.5 - 1e-5, 1.0, 0.0), False),
        (Finding("a", "mlp", 0.5, float("nan"), 1.0, 0.0), False),
        (Finding("a", "mlp", 0.5, float("inf"), 1.0, 0.0), False),
        (Finding("a", "mlp", 0.0, 1e-9, 1.0, 0.0), True),  # nothing, up to what sums can tell
        (Finding("a", "mlp", 0.0, 1e-7, 1.0, 0.0), False),
        (Finding("a", "mlp", 0.0, 1e-7, 100.0, 0.0), True),
        (Finding("a", "mlp", 0.0, -1.0, 1.0, 0.0), True),  # a negative error is none
        (Finding("a", "mlp", -0.1, 0.15, 1.0, 0.0), True),
        (Finding("a", "mlp", -0.1, 0.25, 1.0, 0.0), False),
        (Finding("a", "mlp", 0.5, 0.5005, 1.0, 1e-4), True),  # 2 sqrt(0.5) 4e-4 is 5.7e-4
        (Finding("a", "mlp", 0.5, 0.501, 1.0, 1e-4), False),
        (Finding("a", "mlp", 0.5, 0.502, 1.0, 1e-4, terms=16.0), True),
        (Finding("a", "mlp", 0.5, 0.501, 16.0, 1e-4, terms=1.0), True),
        (Finding("a", "attn", 0.5, 0.55, 1.0, 0.0, estimated=0.01), True),
        (Finding("a", "attn", 0.5, 0.7, 1.0, 0.0, estimated=0.01), False),
        (Finding("a", "vo", 0.5, 0.5001, 1.0, 0.0, sums=200.0), True),
        (Finding("a", "vo", 0.5, 0.5001, 1.0, 0.0, sums=50.0), False),
    ],
)
def test_errors_agree_up_to_rounding(finding: Finding, agrees: bool) -> None:
    assert finding.agrees is agrees


def test_disagreement_is_told_with_both_errors_and_how_many_there_are() -> None:
    good, odd = Finding("a", "mlp", 0.5, 0.5, 2.0, 0.0), Finding("b", "vo", 0.5, 1.0, 2.0, 0.0)
    require_agreement([])
    require_agreement([good, good])
    told = r"b \(vo\) should have an error of 25\.000% .* weights give 50\.000%; 2 of 3 sites disagree"
    with pytest.raises(ModelError, match=told):
        require_agreement([good, odd, odd])
    with pytest.raises(ModelError, match=r"an error of 0\.000% .* give 0\.000%; 1 of 1"):
        require_agreement([Finding("b", "vo", 0.5, 1.0, 0.0, 0.0)])


def test_the_precision_is_that_of_the_pruned_weights() -> None:
    model, smaller, stats, plan = pruned("vit", RECIPES["paper"])
    sites = corp.find_sites(model)
    steps: list[int] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = verify(model, smaller.to(dtype), sites, stats, plan, steps.append)
        assert {one.epsilon for one in found} == {torch.finfo(dtype).eps}
        assert all(one.agrees for one in found)
    assert steps == [1] * 3 * len(plan.sites)
