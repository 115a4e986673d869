"""Carry out a plan at the sites of one module: fit once more, fold the compensation into the weights, narrow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.grams import Grams
from corp.calibration.statistics import Statistics
from corp.numerics import affine, logit, rotary, values
from corp.numerics.subspace import Subspace
from corp.planning.fitting import fit_head, fit_mlp, fit_turned, head_system, moments_for_fit, split
from corp.planning.heads import HeadSums, fit_group
from corp.planning.linear import choose_values, in_basis
from corp.planning.plan import SitePlan
from corp.recipe import SUBSPACE, Recipe
from corp.sites import AttentionSite, MLPSite, Projection, Site, ValueSite, projection_at
from corp.surgery.attention import HeadMaps, Parts, narrow_queries, narrow_values, replace_attention
from corp.surgery.linear import shrink_down, shrink_mlp

Planned: TypeAlias = tuple[Site, SitePlan]


def apply_sites(model: nn.Module, group: Sequence[Planned], stats: Statistics | None, recipe: Recipe) -> None:
    """Narrow, in place, what the plan says of one module: an MLP, or an attention's queries and keys, values or both.

    Without statistics nothing is compensated: that makes the frame which saved weights go into.
    """
    parts: Parts = {}
    for site, site_plan in group:
        kept = site_plan.indices()
        if isinstance(site, AttentionSite):
            mapped = recipe.compensate == "full" or site_plan.basis == SUBSPACE
            maps = head_maps(site, stats, site_plan, recipe) if stats and mapped else None
            parts |= narrow_queries(model, site, kept, maps)
            continue
        bias = site_plan.intercept or projection_at(model, site.down).bias is not None
        if isinstance(site, MLPSite):
            folded = fold_mlp(model, site, stats, site_plan, recipe) if stats else None
            shrink_mlp(model, site, kept[0], folded, bias=bias)
            continue
        fold = fold_values(model, site, stats, site_plan, recipe) if stats else ValueFold()
        parts |= narrow_values(model, site, kept, fold.maps)
        shrink_down(model, site, values.kept_inputs(kept, site.width, site.heads), fold.folded, bias=bias)
    if parts:
        first = group[0][0]
        assert not isinstance(first, MLPSite)
        replace_attention(model, first, parts)


def fold_mlp(model: nn.Module, site: MLPSite, stats: Statistics, site_plan: SitePlan, recipe: Recipe) -> affine.Folded:
    """The second linear, with the prediction of what is removed folded in."""
    (kept,) = site_plan.indices()
    pruned = split(site.width, kept)
    W, b = in_float64(projection_at(model, site.down))
    mean, cov = moments_for_fit(stats.moments_of(site.name).all, site_plan.intercept)
    fit = fit_mlp(mean, cov, kept, pruned, recipe.compensate, site_plan.ridge)
    return affine.fold(W, b, kept, pruned, fit)


class ValueFold(NamedTuple):
    """What turns every value head's rows into its new ones, (e, d) each, and the new output projection."""

    maps: Sequence[Tensor] | None = None
    folded: affine.Folded | None = None


def fold_values(model: nn.Module, site: ValueSite, stats: Statistics, site_plan: SitePlan, recipe: Recipe) -> ValueFold:
    """As fold_mlp, in the basis of the plan."""
    W, b = in_float64(projection_at(model, site.down))
    moments = stats.moments_of(site.name).all
    _, basis = choose_values(site, W, moments, site_plan.intercept, site_plan.keep, recipe)
    kept = values.kept_inputs(site_plan.indices(), site.width, site.heads)
    pruned = split(site.inputs, kept)
    here = in_basis(W, *moments_for_fit(moments, site_plan.intercept), basis, site.heads)
    fit = fit_mlp(*here[1:], kept, pruned, recipe.compensate, site_plan.ridge)
    folded = affine.fold(here[0], b, kept, pruned, fit)
    return ValueFold(None if basis is None else list(basis.to[:, : site_plan.keep]), folded)


def in_float64(down: Projection) -> tuple[Tensor, Tensor]:
    """Weight and bias, zeros where there is none, on the CPU: not every device has float64."""
    W = down.weight.cpu().double()
    return W, W.new_zeros(len(W)) if down.bias is None else down.bias.cpu().double()


def head_maps(site: AttentionSite, stats: Statistics, site_plan: SitePlan, recipe: Recipe) -> HeadMaps:
    """The compensation of every head, as maps of its rows."""
    sums = HeadSums.of(site, stats)
    turned = None if sums.pairs is None else sums.pairs.all
    grams = None if sums.grams is None else sums.grams.all
    shared, dims = site.heads // site.groups, site.rotary_dims
    queries, keys = [], []
    for g, kept in enumerate(site_plan.indices()):
        pairs, plain = kept[kept < dims // 2], kept[kept >= dims] - dims
        q_parts: list[list[Tensor]] = [[] for _ in range(shared)]
        k_parts: list[Tensor] = []
        if turned is not None:
            moments = turned.group(g, weighted=recipe.rank == "exact")
            for q_part, A in zip(q_parts, moments, strict=True):
                system = rotary.pair_system(A, pairs, split(dims // 2, pairs))
                q_part.append(rotary.pair_map(pairs, dims, fit_turned(system, recipe.compensate, site_plan.ridge)))
            k_parts.append(rotary.pair_map(pairs, dims))
        if grams is not None:
            group = range(g * shared, (g + 1) * shared)
            fit = _plain_maps(site, sums, grams, g, group, plain, site_plan, recipe)
            for q_part, A in zip(q_parts, fit.A, strict=True):
                q_part.append(A)
            k_parts.append(fit.B)
        queries += [torch.block_diag(*part) for part in q_parts]
        keys.append(torch.block_diag(*k_parts))
    return HeadMaps(queries, keys)


def _plain_maps(
    site: AttentionSite,
    sums: HeadSums,
    grams: Grams,
    g: int,
    group: range,
    kept: Tensor,
    site_plan: SitePlan,
    recipe: Recipe,
) -> Subspace:
    """Of the query heads that share key head g: what becomes of their dimensions that are not rotated."""
    ridge, width = site_plan.ridge, site.plain_width
    if site_plan.basis == SUBSPACE:
        known: Subspace | None = sums.fits.get((g, len(kept), ridge))
        return known or fit_group(grams, group, len(kept), recipe.compensate, ridge)
    queries = []
    for h in group:
        M = sums.fits.get((h, tuple(kept.tolist()), ridge))
        if M is None:  # planned elsewhere
            M = fit_head(head_system(grams.head(h), kept, split(width, kept)), "full", ridge)
        A, B = logit.fold_factors(M) if len(group) == 1 else logit.query_factors(M)
        queries.append(logit.head_map(kept, width, A))
    return Subspace(torch.stack(queries), logit.head_map(kept, width, B))
