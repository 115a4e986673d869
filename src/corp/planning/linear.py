"""MLP channels and value dimensions: both are inputs of a linear layer, which makes up for those that go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corp.calibration.moments import Moments
from corp.calibration.site_sums import SiteSums
from corp.numerics import affine, exact, rank, values
from corp.observer import stage
from corp.planning.fitting import fit_mlp, moments_for_fit, split
from corp.planning.plan import GroupCost, SitePlan
from corp.recipe import COORDINATES, Recipe
from corp.sites import MLPSite, Projection, ValueSite


class Layer(NamedTuple):
    """The linear that consumes a site's channels, and the moments of its input, in the basis that is pruned in."""

    W: Tensor  # (o, D)
    mean: Tensor  # (D,)
    cov: Tensor  # (D, D)


def layer_of(down: Projection, moments: Moments, intercept: bool) -> Layer:
    return Layer(down.weight.cpu().double(), *moments_for_fit(moments, intercept))


def plan_mlp(
    site: MLPSite,
    keep: int,
    down: Projection,
    sums: SiteSums[Moments],
    recipe: Recipe,
    known: dict[Any, Any] | None = None,
) -> SitePlan:
    """Rank, choose and predict for one MLP that keeps so many channels; `down` is its second linear, in float64.

    `known` may hold the site's elimination path (see whole_path), which gives the choice at every width.
    """
    intercept = uses_intercept(recipe, down.bias is not None)

    def layer(moments: Moments) -> Layer:
        return layer_of(down, moments, intercept)

    moments = sums.all
    here = layer(moments)
    with stage("rank"):
        kept, pruned = choose_channels(here, moments, keep, recipe, known or {})
    ridge = choose_ridge(sums, kept, pruned, recipe, layer)
    costs = (predict(here, sums, kept, pruned, recipe.compensate, ridge, layer),)
    sparsity = 1 - keep / site.width if recipe.has_target else recipe.sparsity("mlp", site.name)
    return SitePlan(site.name, "mlp", site.width, sparsity, (tuple(kept.tolist()),), intercept, costs, ridge)


def plan_values(site: ValueSite, keep: int, down: Projection, sums: SiteSums[Moments], recipe: Recipe) -> SitePlan:
    """Turn the heads, choose and predict for the values of one attention; `down` is its output projection."""
    intercept = uses_intercept(recipe, down.bias is not None)
    kept_groups, basis = choose_values(site, down.weight, sums.all, intercept, keep, recipe)
    kept = values.kept_inputs(kept_groups, site.width, site.heads)
    pruned = split(site.inputs, kept)

    def layer(moments: Moments) -> Layer:
        return in_basis(down.weight, *moments_for_fit(moments, intercept), basis, site.heads)

    ridge = choose_ridge(sums, kept, pruned, recipe, layer)
    cost = predict(layer(sums.all), sums, kept, pruned, recipe.compensate, ridge, layer)
    groups = tuple(tuple(group.tolist()) for group in kept_groups)
    sparsity = 1 - keep / site.width if recipe.has_target else recipe.sparsity("vo", site.name)
    return SitePlan(site.name, "vo", site.width, sparsity, groups, intercept, (cost,), ridge, recipe.vo_basis)


def choose_channels(
    here: Layer, moments: Moments, keep: int, recipe: Recipe, known: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """(kept, pruned) by the recipe's ranking."""
    if recipe.rank != "exact":
        return rank.top(_scores(here.W, moments, recipe), keep)
    ridge = recipe.ridge_given
    path: exact.Path = known.get(("path", ridge)) or exact.elimination_path(here.W, here.cov, ridge=ridge, least=keep)
    return path.keep(keep)


def whole_path(here: Layer, recipe: Recipe, known: dict[Any, Any]) -> exact.Path:
    """The elimination path down to one channel, kept in `known`: it is most of the work, and serves every width."""
    key = ("path", recipe.ridge_given)
    if key not in known:
        known[key] = exact.elimination_path(here.W, here.cov, ridge=recipe.ridge_given)
    path: exact.Path = known[key]
    return path


def choose_values(
    site: ValueSite, W: Tensor, moments: Moments, intercept: bool, keep: int, recipe: Recipe
) -> tuple[list[Tensor], values.Basis | None]:
    """What every value head keeps, and the basis that is meant; None for the dimensions as they are."""
    _, cov = moments_for_fit(moments, intercept)
    with stage("rank"):
        if recipe.vo_basis != COORDINATES:
            basis = values.value_basis(W, cov, site.heads, site.groups, keep, ridge=recipe.ridge_given)
            return [torch.arange(keep)] * site.groups, basis
        if recipe.rank == "exact":  # the last to go are the best to keep
            order = exact.elimination_path(W, cov, ridge=recipe.ridge_given).order
            scores = torch.empty(len(order), dtype=torch.float64).scatter_(0, order, torch.arange(len(order)).double())
        else:
            scores = _scores(W, moments, recipe)
        by_group = scores.view(site.groups, -1, site.width).sum(1)
        return [rank.top(group, keep)[0] for group in by_group], None


def _scores(W: Tensor, moments: Moments, recipe: Recipe) -> Tensor:
    return rank.mlp_scores(recipe.rank, moments.energy, moments.cov.diagonal(), moments.active_share, W)


def in_basis(W: Tensor, mean: Tensor, cov: Tensor, basis: values.Basis | None, heads: int) -> Layer:
    return Layer(W, mean, cov) if basis is None else Layer(*values.turn(W, mean, cov, basis, heads))


def predict(
    here: Layer,
    sums: SiteSums[Moments],
    kept: Tensor,
    pruned: Tensor,
    compensate: str,
    ridge: float,
    layer: Callable[[Moments], Layer],
) -> GroupCost:
    """What the choice costs on all data, and how a fit without the held-out batches does on those."""
    fit = fit_mlp(here.mean, here.cov, kept, pruned, compensate, ridge)
    unseen: tuple[float | None, float | None] = None, None
    if compensate == "full" and _judged(sums):
        unseen = _judge(sums, kept, pruned, ridge, layer)
    return GroupCost(*affine.distortion(*here, kept, pruned, fit), affine.output_energy(*here), *unseen)


def choose_ridge(
    sums: SiteSums[Moments], kept: Tensor, pruned: Tensor, recipe: Recipe, layer: Callable[[Moments], Layer]
) -> float:
    """The recipe's."""
    return recipe.ridge_given


def _judged(sums: SiteSums[Moments]) -> bool:
    return sums.fit.n > 0 and sums.held.n > 0


def _judge(
    sums: SiteSums[Moments], kept: Tensor, pruned: Tensor, ridge: float, layer: Callable[[Moments], Layer]
) -> tuple[float | None, float | None]:
    """Fit without the held-out batches; the unexplained share on its own data and on theirs."""
    seen = layer(sums.fit)
    fit = fit_mlp(seen.mean, seen.cov, kept, pruned, "full", ridge)

    def unexplained(here: Layer) -> float | None:
        whole = affine.error(*here, kept, pruned, affine.mean_only(here.mean, kept, pruned))
        return affine.error(*here, kept, pruned, fit) / whole if whole > 0 else None

    return unexplained(seen), unexplained(layer(sums.held))


def uses_intercept(recipe: Recipe, has_bias: bool) -> bool:
    """ "auto" takes an intercept where the second linear has a bias to hold it; a mean correction needs one."""
    if recipe.intercept == "auto":
        return has_bias or recipe.compensate == "mean"
    return bool(recipe.intercept)
