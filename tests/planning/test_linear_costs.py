"""Predicted costs of MLPs and values against outputs computed token by token, with the folded layer of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from corp.calibration.moments import Moments
from corp.calibration.site_sums import SiteSums
from corp.numerics.exact import Path
from corp.planning.linear import fold_linear, plan_linear, sketch_linear
from corp.planning.site_plan import LinearFold, SitePlan
from corp.recipe import Recipe
from corp.sites import LinearSite, MLPSite, Projection, Rows, ValueSite
from tests.helpers.seeds import seeded

HEADS, GROUPS, WIDTH, OUT = 4, 2, 4, 5
D = HEADS * WIDTH
MLP = MLPSite("mlp", (Rows("up", 0, D),), "down")
VALUES = ValueSite("attn.values", Rows("v", 0, GROUPS * WIDTH), HEADS, "o", "attn", None, kv_heads=GROUPS)
PAPER, FULL = Recipe.paper(mlp=0.5, vo=0.5, vo_basis="coordinates"), Recipe(mlp=0.5, vo=0.5)
EXACT = replace(PAPER, rank="exact")
SITES = [pytest.param(MLP, D // 2, id="mlp"), pytest.param(VALUES, WIDTH // 2, id="values")]
every_site = pytest.mark.parametrize(("site", "keep"), SITES)
every_recipe = pytest.mark.parametrize("recipe", [PAPER, EXACT, FULL], ids=["paper", "exact", "full"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def tokens(number: int, count: int) -> Tensor:
    """Correlated inputs (N, D) with a mean."""
    mix = torch.randn(D, D, generator=seeded(0), dtype=torch.float64)
    return torch.randn(count, D, generator=seeded(number), dtype=torch.float64) @ mix + torch.arange(D) / 8


FIT, HELD = tokens(1, 60), tokens(2, 40)
BOTH = torch.cat([FIT, HELD])


def layer(bias: bool) -> Projection:
    draw = seeded(3)
    W = torch.randn(OUT, D, generator=draw, dtype=torch.float64) * (1 + torch.arange(D) % 3)
    return Projection(W, torch.randn(OUT, generator=draw, dtype=torch.float64) if bias else None)


def sums(fit: Tensor, held: Tensor | None) -> SiteSums[Moments]:
    made = SiteSums(Moments(D), Moments(D))
    made.fit.update(fit)
    if held is not None:
        made.held.update(held)
    return made


def inputs_of(site: LinearSite, plan: SitePlan) -> list[int]:
    """The kept inputs of the layer."""
    if isinstance(site, MLPSite):
        return list(plan.kept[0])
    return [h * WIDTH + i for h in range(HEADS) for i in plan.kept[h // (HEADS // GROUPS)]]


def fold_of(plan: SitePlan) -> LinearFold:
    assert isinstance(plan.fold, LinearFold)
    return plan.fold


def output(x: Tensor, site: LinearSite, plan: SitePlan, fold: LinearFold) -> Tensor:
    """What the narrowed layer computes of dense inputs x."""
    if fold.maps:
        heads = x.unflatten(1, (HEADS, WIDTH)).unbind(1)
        narrow = torch.cat([head @ fold.maps[h // (HEADS // GROUPS)].mT for h, head in enumerate(heads)], 1)
    else:
        narrow = x[:, inputs_of(site, plan)]
    return narrow @ fold.folded.W.mT + fold.folded.b


def dense(x: Tensor, down: Projection) -> Tensor:
    return x @ down.weight.mT + (0 if down.bias is None else down.bias)


def lost(x: Tensor, site: LinearSite, plan: SitePlan, down: Projection) -> Tensor:
    """What the removed inputs contributed."""
    gone = [i for i in range(D) if i not in inputs_of(site, plan)]
    return x[:, gone] @ down.weight[:, gone].mT


def mean_square(y: Tensor) -> float:
    return float(y.square().sum(1).mean())


@with_and_without_bias
@every_recipe
@every_site
def test_predicted_errors_are_those_of_the_output(site: LinearSite, keep: int, recipe: Recipe, bias: bool) -> None:
    down = layer(bias)
    plan = plan_linear(site, keep, down, sums(FIT, HELD), recipe)
    (cost,) = plan.costs
    assert pytest.approx(mean_square(output(BOTH, site, plan, fold_of(plan)) - dense(BOTH, down))) == cost.J
    assert cost.energy == pytest.approx(mean_square(BOTH @ down.weight.mT))
    assert cost.J_star <= cost.J < cost.J_uncomp
    assert bool(fold_of(plan).folded.b.any()) == plan.intercept == bias
    assert (plan.keep, plan.requested) == (keep, 0.5)
    if plan.basis == "coordinates":
        assert cost.J_uncomp == pytest.approx(mean_square(lost(BOTH, site, plan, down)))


@with_and_without_bias
@every_site
@pytest.mark.parametrize("judged", [100, 2])
def test_unexplained_shares_are_those_of_a_fit_without_the_held_out_tokens(
    site: LinearSite, keep: int, bias: bool, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of the variance of what was removed, about its mean if there is a bias to hold it; of some outputs."""
    monkeypatch.setattr("corp.planning.linear.JUDGED", judged)
    down = layer(bias)
    plan = plan_linear(site, keep, down, sums(FIT, HELD), PAPER)
    (cost,) = plan.costs
    fold = fold_linear(site, plan, down, sums(FIT, None), PAPER)
    for x, found in ((FIT, cost.fit), (HELD, cost.held)):
        some = slice(None, None, -(-len(down.weight) // judged))
        left = mean_square((output(x, site, plan, fold) - dense(x, down))[:, some])
        removed = lost(x, site, plan, down)[:, some]
        assert found == pytest.approx(left / mean_square(removed - bias * removed.mean(0)))


@every_recipe
@every_site
def test_without_a_full_fit_or_held_out_tokens_nothing_is_said_of_unseen_data(
    site: LinearSite, keep: int, recipe: Recipe
) -> None:
    plans = [
        plan_linear(site, keep, layer(True), sums(FIT, None), recipe),
        plan_linear(site, keep, layer(True), sums(FIT, HELD), replace(recipe, compensate="none")),
    ]
    assert [(plan.costs[0].fit, plan.costs[0].held) for plan in plans] == [(None, None)] * 2
    judged = plan_linear(site, keep, layer(True), sums(FIT, HELD), recipe).costs[0]
    assert 0 < (judged.fit or 0) < 1


@every_recipe
@every_site
def test_a_plan_records_the_share_that_was_requested_or_what_a_target_left(
    site: LinearSite, keep: int, recipe: Recipe
) -> None:
    keep, given = keep + keep // 2, sums(FIT, None)
    assert plan_linear(site, keep, layer(True), given, recipe).requested == 0.5
    aimed = replace(recipe, mlp=0.0, vo=0.0, target_macs=0.5)
    assert plan_linear(site, keep, layer(True), given, aimed).requested == 0.25


@every_recipe
@every_site
def test_a_sketch_and_a_plan_from_a_file_have_the_layer_of_the_plan(
    site: LinearSite, keep: int, recipe: Recipe
) -> None:
    down, given = layer(True), sums(FIT, HELD)
    plan = plan_linear(site, keep, down, given, recipe)
    sketch = sketch_linear(site, keep, down, given, recipe)
    assert (sketch.kept, sketch.costs, sketch.basis, sketch.ridge) == (plan.kept, (), plan.basis, plan.ridge)
    for fold in (fold_of(sketch), fold_linear(site, plan, down, given, recipe)):
        torch.testing.assert_close(fold.folded, fold_of(plan).folded)
        torch.testing.assert_close(fold.maps, fold_of(plan).maps)


@pytest.mark.parametrize(("compensate", "bias", "expected"), [("mean", False, True), ("none", False, False)])
def test_a_mean_correction_has_an_intercept_without_a_bias(compensate: str, bias: bool, expected: bool) -> None:
    down = layer(bias)
    plan = plan_linear(MLP, 8, down, sums(FIT, None), replace(PAPER, compensate=compensate))
    assert plan.intercept is expected
    removed = lost(FIT, MLP, plan, down)
    torch.testing.assert_close(fold_of(plan).folded.b, removed.mean(0) if expected else torch.zeros_like(removed[0]))
    assert pytest.approx(mean_square(removed - expected * removed.mean(0))) == plan.costs[0].J


def test_the_papers_ranking_keeps_the_largest_products_of_energy_and_weights() -> None:
    down = layer(True)
    scores = BOTH.square().mean(0) * down.weight.norm(dim=0)
    plan = plan_linear(MLP, 8, down, sums(FIT, HELD), PAPER)
    assert plan.kept == (tuple(sorted(scores.argsort(descending=True)[:8].tolist())),)


def test_query_heads_that_share_values_rank_them_together() -> None:
    down = layer(True)
    score = BOTH.square().mean(0) * down.weight.norm(dim=0)
    plan = plan_linear(VALUES, 2, down, sums(FIT, HELD), PAPER)
    both = score.view(GROUPS, HEADS // GROUPS, WIDTH).sum(1)
    assert plan.kept == tuple(tuple(sorted(group.argsort(descending=True)[:2].tolist())) for group in both)


@with_and_without_bias
def test_the_exact_ranking_drops_the_channel_that_costs_least_after_refitting(bias: bool) -> None:
    down = layer(bias)
    plan = plan_linear(MLP, D - 1, down, sums(FIT, HELD), replace(EXACT, ridge=0.0))
    costs = []
    for gone in range(D):
        left = [i for i in range(D) if i != gone]
        known = torch.cat([BOTH[:, left], torch.ones(len(BOTH), int(bias), dtype=torch.float64)], 1)
        removed = BOTH[:, gone, None] * down.weight[:, gone]
        costs.append(mean_square(removed - known @ torch.linalg.lstsq(known, removed).solution))
    assert set(range(D)) - set(plan.kept[0]) == {costs.index(min(costs))}
    assert pytest.approx(min(costs)) == plan.costs[0].J


def test_a_known_elimination_path_is_followed() -> None:
    """Its ridge is the fit's too if it is larger than the recipe's."""
    down = layer(True)
    path = Path(torch.arange(D).flip(0), torch.arange(D, dtype=torch.float64), ridge=0.25)
    for made in (plan_linear, sketch_linear):
        plan = made(MLP, 6, down, sums(FIT, HELD), EXACT, path)
        assert (plan.kept, plan.ridge) == ((tuple(range(6)),), 0.25)
