"""One site's plan, whatever its kind: the three questions that everything above asks of planning."""

from __future__ import annotations

from torch import nn

from corp.calibration.statistics import Statistics
from corp.numerics.exact import Path
from corp.planning.heads import HeadSums, fold_attention, plan_attention, sketch_attention
from corp.planning.linear import fold_linear, plan_linear, sketch_linear
from corp.planning.plan import Fold, SitePlan
from corp.recipe import Recipe
from corp.sites import AttentionSite, Site, projection_at


def plan_site(
    model: nn.Module, site: Site, keep: int, stats: Statistics, recipe: Recipe, path: Path | None = None
) -> SitePlan:
    """What the site keeps at this width, the compensation and its predicted cost."""
    if isinstance(site, AttentionSite):
        return plan_attention(site, keep, HeadSums.of(site, stats), recipe)
    return plan_linear(site, keep, projection_at(model, site.down), stats.moments_of(site.name), recipe, path)


def sketch_site(
    model: nn.Module, site: Site, keep: int, stats: Statistics, recipe: Recipe, path: Path | None = None
) -> SitePlan:
    """The same without predictions: for models that are made to be tried."""
    if isinstance(site, AttentionSite):
        return sketch_attention(site, keep, HeadSums.of(site, stats), recipe)
    return sketch_linear(site, keep, projection_at(model, site.down), stats.moments_of(site.name), recipe, path)


def fold_site(model: nn.Module, site: Site, site_plan: SitePlan, stats: Statistics, recipe: Recipe) -> Fold:
    """The compensation of a plan that was read from a file."""
    if isinstance(site, AttentionSite):
        return fold_attention(site, site_plan, HeadSums.of(site, stats), recipe)
    return fold_linear(site, site_plan, projection_at(model, site.down), stats.moments_of(site.name), recipe)
