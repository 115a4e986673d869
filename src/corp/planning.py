"""What every site keeps and what that costs: rank, choose, predict. No data, no change to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from corp.fitting import fit_head, fit_mlp, fit_turned, head_system, moments_for_fit, split
from corp.numerics import affine, exact, logit, rank, rotary, values
from corp.plan import GroupCost, SitePlan
from corp.recipe import COORDINATES, Recipe
from corp.sites import AttentionSite, MLPSite, ValueSite
from corp.stages import stage
from corp.stats import Grams, Moments, SiteSums, Statistics
from corp.stats.pairs import PairSums
from corp.surgery.linear import Projection
from corp.widths import rotated_part

Part: TypeAlias = tuple[list[int], GroupCost]  # dimensions kept, and their cost


class HeadSums(NamedTuple):
    """The sums of an attention's rotated dimensions and of the others, where it has them."""

    pairs: SiteSums[PairSums] | None
    grams: SiteSums[Grams] | None
    fits: dict[Any, Tensor]  # M of the last plan, by head, what it kept and the ridge

    @classmethod
    def of(cls, site: AttentionSite, stats: Statistics) -> HeadSums:
        pairs = stats.pairs_of(site.name) if site.rotary else None
        grams = stats.grams_of(site.plain_name) if site.plain_width else None
        return cls(pairs, grams, stats.fits.setdefault(site.name, {}))


def plan_mlp(site: MLPSite, keep: int, down: Projection, sums: SiteSums[Moments], recipe: Recipe) -> SitePlan:
    """Rank, choose and predict for one MLP that keeps so many channels; `down` is its second linear, in float64."""
    W, has_bias = down.weight, down.bias is not None
    intercept = uses_intercept(recipe, has_bias)
    moments = sums.all
    mean, cov = moments_for_fit(moments, intercept)
    with stage("rank"):
        kept, pruned = choose_channels(W, moments, cov, keep, recipe)
    fit = fit_mlp(mean, cov, kept, pruned, recipe.compensate, recipe.ridge)
    cost = affine.distortion(W, mean, cov, kept, pruned, fit)
    unseen = judge_linear(sums, kept, pruned, recipe, lambda part: (W, *moments_for_fit(part, intercept)))
    costs = (GroupCost(*cost, affine.output_energy(W, mean, cov), *unseen),)
    sparsity = recipe.sparsity("mlp", site.name)
    return SitePlan(site.name, "mlp", site.width, sparsity, (tuple(kept.tolist()),), intercept, costs)


def choose_channels(W: Tensor, moments: Moments, cov: Tensor, keep: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(kept, pruned) by the recipe's ranking."""
    if recipe.rank == "exact":
        return exact.elimination_path(W, cov, ridge=recipe.ridge, least=keep).keep(keep)
    scores = rank.mlp_scores(recipe.rank, moments.energy, moments.cov.diagonal(), moments.active_share, W)
    return rank.top(scores, keep)


def judge_linear(
    sums: SiteSums[Moments],
    kept: Tensor,
    pruned: Tensor,
    recipe: Recipe,
    layer: Callable[[Moments], tuple[Tensor, Tensor, Tensor]],
) -> tuple[float | None, float | None]:
    """Fit without the held-out batches; the unexplained share on its own data and on theirs.

    `layer` gives the weight that is folded into, and mean and covariance of its input, from some moments.
    """
    if recipe.compensate != "full" or sums.fit.n == 0 or sums.held.n == 0:
        return None, None
    _, mean, cov = layer(sums.fit)
    fit = fit_mlp(mean, cov, kept, pruned, "full", recipe.ridge)

    def unexplained(moments: Moments) -> float | None:
        W, mean, cov = layer(moments)
        whole = affine.error(W, mean, cov, kept, pruned, affine.mean_only(mean, kept, pruned))
        return affine.error(W, mean, cov, kept, pruned, fit) / whole if whole > 0 else None

    return unexplained(sums.fit), unexplained(sums.held)


def plan_values(site: ValueSite, keep: int, down: Projection, sums: SiteSums[Moments], recipe: Recipe) -> SitePlan:
    """Turn the heads, choose and predict for the values of one attention; `down` is its output projection."""
    W = down.weight  # (o, H d)
    intercept = uses_intercept(recipe, down.bias is not None)
    kept_groups, basis = choose_values(site, W, sums.all, intercept, keep, recipe)
    kept = values.kept_inputs(kept_groups, site.width, site.heads)
    pruned = split(site.inputs, kept)

    def layer(moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
        return in_basis(W, *moments_for_fit(moments, intercept), basis, site.heads)

    here = layer(sums.all)
    fit = fit_mlp(*here[1:], kept, pruned, recipe.compensate, recipe.ridge)
    unseen = judge_linear(sums, kept, pruned, recipe, layer)
    cost = GroupCost(*affine.distortion(*here, kept, pruned, fit), affine.output_energy(*here), *unseen)
    groups = tuple(tuple(group.tolist()) for group in kept_groups)
    sparsity = recipe.sparsity("vo", site.name)
    return SitePlan(site.name, "vo", site.width, sparsity, groups, intercept, (cost,), recipe.vo_basis)


def choose_values(
    site: ValueSite, W: Tensor, moments: Moments, intercept: bool, keep: int, recipe: Recipe
) -> tuple[list[Tensor], values.Basis | None]:
    """What every value head keeps, and the basis that is meant; None for the dimensions as they are."""
    _, cov = moments_for_fit(moments, intercept)
    with stage("rank"):
        if recipe.vo_basis != COORDINATES:
            basis = values.value_basis(W, cov, site.heads, site.groups, keep, ridge=recipe.ridge)
            return [torch.arange(keep)] * site.groups, basis
        if recipe.rank == "exact":  # the last to go are the best to keep
            order = exact.elimination_path(W, cov, ridge=recipe.ridge).order
            scores = torch.empty(len(order), dtype=torch.float64).scatter_(0, order, torch.arange(len(order)).double())
        else:
            scores = rank.mlp_scores(recipe.rank, moments.energy, moments.cov.diagonal(), moments.active_share, W)
        by_group = scores.view(site.groups, -1, site.width).sum(1)
        return [rank.top(group, keep)[0] for group in by_group], None


def in_basis(
    W: Tensor, mean: Tensor, cov: Tensor, basis: values.Basis | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (W, mean, cov) if basis is None else values.turn(W, mean, cov, basis, heads)


def plan_attention(site: AttentionSite, keep: int, sums: HeadSums, recipe: Recipe) -> SitePlan:
    """Rank, choose and predict for every key head of one attention and the query heads that share it."""
    pairs_kept = rotated_part(site, keep) // 2 if site.rotary else 0
    plain_kept = keep - 2 * pairs_kept
    sums.fits.clear()
    all_pairs = None if sums.pairs is None else sums.pairs.all  # fitted and held-out together: added once, not per head
    all_grams = None if sums.grams is None else sums.grams.all
    shared = site.heads // site.groups
    kept_groups, costs = [], []
    for g in range(site.groups):
        kept: list[int] = []
        paid = []
        if sums.pairs is not None and all_pairs is not None:
            pairs, cost = plan_pairs(sums.pairs, all_pairs, g, pairs_kept, recipe)
            kept += pairs
            paid.append(cost)
        if sums.grams is not None and all_grams is not None:
            heads = range(g * shared, (g + 1) * shared)
            others, cost = plan_heads(sums.grams, all_grams, heads, plain_kept, recipe, sums.fits)
            kept += [site.rotary_dims + i for i in others]
            paid.append(cost)
        kept_groups.append(tuple(kept))
        costs.append(_together(paid))
    sparsity = recipe.sparsity("attn", site.name)
    return SitePlan(site.name, "attn", site.width, sparsity, tuple(kept_groups), False, tuple(costs))


def plan_heads(
    sums: SiteSums[Grams], whole: Grams, heads: range, keep: int, recipe: Recipe, fits: dict[Any, Tensor]
) -> Part:
    """One kept set of plain dimensions for query heads that share a key head."""
    grams = [whole.head(h) for h in heads]
    with stage("rank"):
        energies = [head.energy() for head in grams]
        kept, pruned = rank.top(torch.stack([E.diagonal() for E in energies]).sum(0), keep)
    costs = []
    for h, head, E in zip(heads, grams, energies, strict=True):
        with stage("compensate"):  # apply takes it over
            system = head_system(head, kept, pruned)
            M = fit_head(system, recipe.compensate, recipe.ridge)
            if recipe.compensate == "full":
                fits[h, tuple(kept.tolist()), recipe.ridge] = M
        costs.append(
            GroupCost(*logit.distortion(system, M), float(E.sum()), *judge_head(sums, h, kept, pruned, recipe))
        )
    return kept.tolist(), _together(costs)


def plan_pairs(sums: SiteSums[PairSums], whole: PairSums, g: int, keep: int, recipe: Recipe) -> Part:
    """One kept set of rotated pairs, for query heads that share key head g; every head is corrected by itself."""
    moments = whole.group(g, weighted=recipe.rank == "exact")  # (R, d, d)
    with stage("rank"):
        if recipe.rank == "exact":
            kept, pruned = rotary.eliminate(moments, keep)
        else:
            kept, pruned = rank.top(torch.stack([rotary.pair_energy(A) for A in moments]).sum(0), keep)
    costs = []
    for h, A in enumerate(moments):
        system = rotary.pair_system(A, kept, pruned)
        unseen = judge_pairs(sums, (g, h), kept, pruned, recipe)
        fit = fit_turned(system, recipe.compensate, recipe.ridge)
        costs.append(GroupCost(*rotary.distortion(system, fit), rotary.logit_energy(A), *unseen))
    return [*kept.tolist(), *(kept + moments.shape[-1] // 2).tolist()], _together(costs)


def judge_pairs(
    sums: SiteSums[PairSums], head: tuple[int, int], kept: Tensor, pruned: Tensor, recipe: Recipe
) -> tuple[float | None, float | None]:
    """As judge_linear, for the pairs of one query head (its key head, its number among those that share it)."""
    if recipe.compensate != "full" or sums.fit.samples == 0 or sums.held.samples == 0:
        return None, None
    group, h = head
    both = (part.group(group, weighted=recipe.rank == "exact")[h] for part in (sums.fit, sums.held))
    systems = [rotary.pair_system(A, kept, pruned) for A in both]
    ab = rotary.fit_pairs(systems[0], ridge=recipe.ridge)
    fit, held = (rotary.error(system, ab) / system.T if system.T > 0 else None for system in systems)
    return fit, held


def _together(costs: Sequence[GroupCost]) -> GroupCost:
    """The cost of what is kept together; shares are weighted by what was lost."""
    if len(costs) == 1:
        return costs[0]
    J, J_star, lost, energy = (sum(getattr(c, name) for c in costs) for name in ("J", "J_star", "J_uncomp", "energy"))
    rho2 = min(1.0, max(0.0, 1 - J_star / lost)) if lost > 0 else 1.0
    unseen = []
    for name in ("fit", "held"):
        known = [(getattr(c, name), c.J_uncomp) for c in costs if getattr(c, name) is not None]
        weight = sum(w for _, w in known)
        unseen.append(sum(x * w for x, w in known) / weight if weight > 0 else None)
    return GroupCost(J, J_star, lost, rho2, energy, *unseen)


def judge_head(
    sums: SiteSums[Grams], h: int, kept: Tensor, pruned: Tensor, recipe: Recipe
) -> tuple[float | None, float | None]:
    """As judge_linear, for one head."""
    if recipe.compensate != "full" or sums.fit.samples == 0 or sums.held.samples == 0:
        return None, None
    systems = [head_system(part.head(h), kept, pruned) for part in (sums.fit, sums.held)]
    M = fit_head(systems[0], "full", recipe.ridge)
    fit, held = (logit.error(system, M) / system.T if system.T > 0 else None for system in systems)
    return fit, held


def uses_intercept(recipe: Recipe, has_bias: bool) -> bool:
    """ "auto" takes an intercept where the second linear has a bias to hold it; a mean correction needs one."""
    if recipe.intercept == "auto":
        return has_bias or recipe.compensate == "mean"
    return bool(recipe.intercept)
