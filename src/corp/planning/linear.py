"""MLP channels and value dimensions: both are inputs of a linear layer, which compensates for removed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from corp.calibration.moments import Moments
from corp.calibration.site_sums import SiteSums
from corp.io.observer import timed
from corp.numerics import affine, exact, rank, values
from corp.planning.fitting import fit_linear, fit_solvable, moments_for_fit, split
from corp.planning.site_plan import GroupCost, LinearFold, SitePlan
from corp.recipe import COORDINATES, SUBSPACE, Recipe
from corp.sites import LinearSite, MLPSite, Projection, ValueSite

JUDGED = 512  # outputs of a layer, at most, whose errors on fitted and on held-out batches are compared


class Layer(NamedTuple):
    """The linear layer that consumes a site's channels, and the moments of its input, in the basis of the pruning."""

    W: Tensor  # (o, D)
    mean: Tensor  # (D,)
    cov: Tensor  # (D, D)


class Choice(NamedTuple):
    """What a site keeps: the indices of every group, and the basis of values if they are rotated."""

    groups: list[Tensor]
    basis: values.Basis | None = None
    ridge: float = 0.0  # at which channels were eliminated

    @property
    def keep(self) -> int:
        """How many channels, or dimensions of every head."""
        return len(self.groups[0])


def layer_of(down: Projection, moments: Moments, intercept: bool) -> Layer:
    """The layer and its input's moments, in their own basis."""
    mean, cov = moments_for_fit(moments, intercept)
    return Layer(down.weight.to(cov), mean, cov)


def rotated(layer: Layer, choice: Choice, heads: int) -> Layer:
    """The layer in the basis of the choice."""
    return layer if choice.basis is None else Layer(*values.rotate(*layer, choice.basis, heads))


def plan_linear(
    site: LinearSite,
    keep: int,
    down: Projection,
    sums: SiteSums[Moments],
    recipe: Recipe,
    path: exact.Path | None = None,
) -> SitePlan:
    """Choose, fit and predict for a site that keeps `keep` channels, or dimensions per value head.

    `down` is the layer that consumes them. `path` is the elimination path of an MLP if it is known already.
    """
    intercept = uses_intercept(recipe, down.bias is not None)
    moments = sums.total()
    whole = layer_of(down, moments, intercept)
    choice = choose(site, keep, whole, moments, recipe, path)
    kept, pruned = _inputs(site, choice.groups)
    here = rotated(whole, choice, heads_in(site))
    del whole

    def layer(part: Moments) -> Layer:
        return rotated(layer_of(down, part, intercept), choice, heads_in(site))

    with timed("compensate"):
        given = affine.removal(*here, kept, pruned)
        fit, choice = fit_choice(given, choice, recipe)
    unseen = _judge(sums, kept, pruned, choice, recipe, layer)
    cost = GroupCost(*affine.distortion(given, fit), affine.energy_before(given, here.W[:, kept]), *unseen)
    fold = _fold(here, down, kept, fit, choice)
    return _site_plan(site, choice, recipe, intercept, (cost,), fold)


def sketch_linear(
    site: LinearSite,
    keep: int,
    down: Projection,
    sums: SiteSums[Moments],
    recipe: Recipe,
    path: exact.Path | None = None,
) -> SitePlan:
    """Choose and fit without predictions, for a trial model."""
    intercept = uses_intercept(recipe, down.bias is not None)
    moments = sums.total()
    layer = layer_of(down, moments, intercept)
    choice = choose(site, keep, layer, moments, recipe, path)
    fold = fold_choice(site, choice, down, layer, recipe)
    return _site_plan(site, choice, recipe, intercept, (), fold)


def fold_linear(
    site: LinearSite, site_plan: SitePlan, down: Projection, sums: SiteSums[Moments], recipe: Recipe
) -> LinearFold:
    """The narrowed layer of a plan that does not contain its fold."""
    moments = sums.total()
    layer = layer_of(down, moments, site_plan.intercept)
    choice = Choice(site_plan.indices(), ridge=site_plan.ridge)
    if isinstance(site, ValueSite) and site_plan.basis == SUBSPACE:
        choice = choose(site, site_plan.keep, layer, moments, recipe)
    return fold_choice(site, choice, down, layer, recipe)


def fold_choice(site: LinearSite, choice: Choice, down: Projection, layer: Layer, recipe: Recipe) -> LinearFold:
    """The layer, narrowed to the choice, with the compensation folded in."""
    kept, pruned = _inputs(site, choice.groups)
    here = rotated(layer, choice, heads_in(site))
    fit, choice = fit_choice(affine.removal(*here, kept, pruned), choice, recipe)
    return _fold(here, down, kept, fit, choice)


def fit_choice(given: affine.Removal, choice: Choice, recipe: Recipe) -> tuple[affine.Affine, Choice]:
    """The compensation at the recipe's ridge or the choice's, and the choice with the ridge that was used."""
    ridge = max(recipe.ridge, choice.ridge)
    if choice.basis is None:
        return fit_linear(given, recipe.compensate, ridge), choice._replace(ridge=ridge)
    fit, ridge = fit_solvable(given, recipe.compensate, ridge)
    return fit, choice._replace(ridge=ridge)


def choose(
    site: LinearSite, keep: int, layer: Layer, moments: Moments, recipe: Recipe, path: exact.Path | None = None
) -> Choice:
    """What the site keeps, by the recipe's ranking or basis."""
    with timed("rank"):
        if isinstance(site, ValueSite):
            return _choose_values(site, keep, layer, moments, recipe)
        if recipe.rank != "exact":
            return Choice([rank.top(_scores(layer.W, moments, recipe), keep)[0]])
        path = path or exact.elimination_path(layer.W, layer.cov, ridge=recipe.ridge, least=keep)
        return Choice([path.keep(keep)[0]], ridge=path.ridge)


def _choose_values(site: ValueSite, keep: int, layer: Layer, moments: Moments, recipe: Recipe) -> Choice:
    if recipe.vo_basis == SUBSPACE:
        basis = values.value_basis(layer.W, layer.cov, site.heads, site.groups, keep, ridge=recipe.ridge)
        return Choice([torch.arange(keep)] * site.groups, basis)
    if recipe.rank == "exact":  # ranked by the loss: positions in the order would tie between heads
        path = exact.elimination_path(layer.W, layer.cov, ridge=recipe.ridge)
        scores = torch.empty_like(path.error).scatter_(0, path.order, path.error)
    else:
        scores = _scores(layer.W, moments, recipe)
    return Choice([rank.top(group, keep)[0] for group in scores.view(site.groups, -1, site.width).sum(1)])


def uses_intercept(recipe: Recipe, has_bias: bool) -> bool:
    """Whether a fit has an intercept: "auto" needs a bias to hold it, and a mean correction is an intercept alone."""
    if recipe.intercept == "auto":
        return has_bias or recipe.compensate == "mean"
    return bool(recipe.intercept)


def heads_in(site: LinearSite) -> int:
    return site.heads if isinstance(site, ValueSite) else 1


def _inputs(site: LinearSite, groups: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The inputs of the consuming layer that are kept, and the others."""
    kept = groups[0] if isinstance(site, MLPSite) else values.kept_inputs(groups, site.width, site.heads)
    return kept, split(site.inputs, kept)


def _scores(W: Tensor, moments: Moments, recipe: Recipe) -> Tensor:
    return rank.mlp_scores(recipe.rank, moments.energy, moments.variance, moments.active_share, W)


def _fold(here: Layer, down: Projection, kept: Tensor, fit: affine.Affine, choice: Choice) -> LinearFold:
    """The consuming layer with the prediction folded in, rounded to the model's dtype once, here."""
    W = down.weight
    b = here.W.new_zeros(len(W)) if down.bias is None else down.bias.to(here.W)
    folded = affine.fold(here.W, b, kept, fit)
    maps = () if choice.basis is None else tuple(choice.basis.to[:, : choice.keep])
    return LinearFold(affine.Folded(*(part.to(W.device, W.dtype) for part in folded)), maps)


def _site_plan(
    site: LinearSite, choice: Choice, recipe: Recipe, intercept: bool, costs: tuple[GroupCost, ...], fold: LinearFold
) -> SitePlan:
    asked = 1 - choice.keep / site.width if recipe.has_target else recipe.sparsity(site.kind, site.name)
    kept = tuple(tuple(group.tolist()) for group in choice.groups)
    basis = COORDINATES if choice.basis is None else SUBSPACE
    ridge = max(recipe.ridge, choice.ridge)
    return SitePlan(site.name, site.kind, site.width, asked, kept, intercept, costs, ridge, basis, fold)


def _judge(
    sums: SiteSums[Moments],
    kept: Tensor,
    pruned: Tensor,
    choice: Choice,
    recipe: Recipe,
    layer: Callable[[Moments], Layer],
) -> tuple[float | None, float | None]:
    """The unexplained shares on fitted and on held-out batches, of a fit without the latter; None without any.

    Of many outputs some are judged, evenly spaced: all are predicted from the same inputs.
    """
    if recipe.compensate != "full" or not sums.fit.n or not sums.held.n:
        return None, None

    def removed(part: Moments) -> affine.Removal:
        W, mean, cov = layer(part)
        return affine.removal(W[:: -(-len(W) // JUDGED)], mean, cov, kept, pruned)

    seen, held = map(removed, (sums.fit, sums.held))
    fit, _ = fit_choice(seen, choice, recipe)
    left, right = (affine.error(part, fit) / part.variance if part.variance > 0 else None for part in (seen, held))
    return left, right
