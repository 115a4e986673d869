"""Plans without predictions: for models that are made to be measured."""

from __future__ import annotations

from torch import nn

from corp.calibration.statistics import Statistics
from corp.numerics.exact import Path
from corp.planning.fitting import moments_for_fit
from corp.planning.heads import HeadSums, sketch_attention
from corp.planning.linear import Layer, choose_channels, choose_values, uses_intercept
from corp.planning.plan import SitePlan
from corp.recipe import COORDINATES, Recipe
from corp.sites import AttentionSite, MLPSite, Site, projection_at


def sketch(
    model: nn.Module, site: Site, keep: int, stats: Statistics, recipe: Recipe, path: Path | None = None
) -> SitePlan:
    """What the site keeps; `path` is the elimination of an MLP's channels, where it is known already."""
    if isinstance(site, AttentionSite):
        return sketch_attention(site, keep, HeadSums.of(site, stats), recipe)
    down = projection_at(model, site.down)
    W, intercept = down.weight.cpu().double(), uses_intercept(recipe, down.bias is not None)
    moments, basis = stats.moments_of(site.name).all, COORDINATES
    if not isinstance(site, MLPSite):
        groups, basis = choose_values(site, W, moments, intercept, keep, recipe)[0], recipe.vo_basis
    elif recipe.rank == "exact" and path is not None:
        groups = [path.keep(keep)[0]]
    else:
        layer = Layer(W, *moments_for_fit(moments, intercept))
        groups = [choose_channels(layer, moments, keep, recipe, {})[0]]
    kept = tuple(tuple(group.tolist()) for group in groups)
    removed = 1 - keep / site.width
    return SitePlan(site.name, site.kind, site.width, removed, kept, intercept, (), recipe.ridge_given, basis)
