"""Carry out a plan at one site: fit once more, fold the compensation into the weights, narrow the module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corp.fitting import fit_head, fit_mlp, fit_turned, head_system, moments_for_fit, split
from corp.numerics import affine, logit, rotary
from corp.plan import SitePlan
from corp.planning import HeadSums
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, Site
from corp.stats import Statistics
from corp.surgery.attention import HeadMaps, shrink_attention
from corp.surgery.linear import projection_at, shrink_mlp


def apply_site(model: nn.Module, site: Site, stats: Statistics, site_plan: SitePlan, recipe: Recipe) -> None:
    """Narrow the site of `model`, in place, to what the plan keeps."""
    if isinstance(site, MLPSite):
        _apply_mlp(model, site, stats, site_plan, recipe)
        return
    maps = head_maps(site, stats, site_plan, recipe) if recipe.compensate == "full" else None
    shrink_attention(model, site, site_plan.indices(), maps)


def _apply_mlp(model: nn.Module, site: MLPSite, stats: Statistics, site_plan: SitePlan, recipe: Recipe) -> None:
    (kept,) = site_plan.indices()
    pruned = split(site.width, kept)
    down = projection_at(model, site.down)
    W = down.weight.cpu().double()
    b = W.new_zeros(len(W)) if down.bias is None else down.bias.cpu().double()
    mean, cov = moments_for_fit(stats.moments_of(site.name).all, site_plan.intercept)
    fit = fit_mlp(mean, cov, kept, pruned, recipe.compensate, recipe.ridge)
    shrink_mlp(
        model, site, kept, affine.fold(W, b, kept, pruned, fit), bias=site_plan.intercept or down.bias is not None
    )


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
                q_part.append(rotary.pair_map(pairs, dims, fit_turned(system, "full", recipe.ridge)))
            k_parts.append(rotary.pair_map(pairs, dims))
        if grams is not None:
            rest = split(site.plain_width, plain)
            for h, q_part in enumerate(q_parts):
                head = g * shared + h
                M = sums.fits.get((head, tuple(plain.tolist()), recipe.ridge))
                if M is None:  # planned elsewhere
                    M = fit_head(head_system(grams.head(head), plain, rest), "full", recipe.ridge)
                A, B = logit.fold_factors(M) if shared == 1 else logit.query_factors(M)
                q_part.append(logit.head_map(plain, site.plain_width, A))
            k_parts.append(logit.head_map(plain, site.plain_width, B))
        queries += [torch.block_diag(*part) for part in q_parts]
        keys.append(torch.block_diag(*k_parts))
    return HeadMaps(queries, keys)
