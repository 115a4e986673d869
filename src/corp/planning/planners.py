"""Plan, sketch or fold one site of any kind: the three functions of planning that the packages above call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from corp.calibration.statistics import Statistics
from corp.numerics.exact import Path
from corp.numerics.subspace import Subspace
from corp.planning.heads import HeadSums, fold_attention, plan_attention, shared_pairs, sketch_attention
from corp.planning.linear import fold_linear, plan_linear, sketch_linear
from corp.planning.site_plan import Fold, SitePlan
from corp.planning.widths import rotated_part
from corp.recipe import SHARED, Recipe
from corp.sites import AttentionSite, Site, projection_at


def plan_site(
    model: nn.Module,
    site: Site,
    keep: int,
    stats: Statistics,
    recipe: Recipe,
    path: Path | None = None,
    pairs: Tensor | None = None,
) -> SitePlan:
    """What the site keeps at this width, the compensation and its predicted cost."""
    if isinstance(site, AttentionSite):
        return plan_attention(site, keep, HeadSums.of(site, stats), recipe, pairs)
    return plan_linear(site, keep, projection_at(model, site.down), stats.moments_of(site.name), recipe, path)


def cost_of(site: Site, samples: int) -> float:
    """The approximate relative time to plan the site: an elimination and fits, or conjugate gradients per head."""
    if not isinstance(site, AttentionSite):
        return float(site.inputs**3)
    return float(site.heads * (10 * samples * site.plain_width**3 + 30 * site.rotary_dims**3))


def pairs_of_all(
    sites: Iterable[Site], widths: Mapping[str, int], stats: Statistics, recipe: Recipe
) -> dict[str, Tensor]:
    """The rotary pairs of every narrower attention under rotary="shared", the same for all of one shape."""
    if recipe.rotary != SHARED:
        return {}
    groups: dict[tuple[int, int], list[AttentionSite]] = {}
    for site in sites:
        if isinstance(site, AttentionSite) and site.rotary and widths[site.name] < site.width:
            kept = rotated_part(site, widths[site.name]) // 2
            groups.setdefault((site.rotary.dims, kept), []).append(site)
    found = {key: shared_pairs(group, key[1], stats, recipe) for key, group in groups.items()}
    return {site.name: found[key] for key, group in groups.items() for site in group}


def sketch_site(
    model: nn.Module,
    site: Site,
    keep: int,
    stats: Statistics,
    recipe: Recipe,
    path: Path | None = None,
    nested: Sequence[Subspace] | None = None,
    pairs: Tensor | None = None,
) -> SitePlan:
    """What the site keeps and its compensation, without predictions, for trial models."""
    if isinstance(site, AttentionSite):
        return sketch_attention(site, keep, HeadSums.of(site, stats), recipe, nested, pairs)
    return sketch_linear(site, keep, projection_at(model, site.down), stats.moments_of(site.name), recipe, path)


def fold_site(model: nn.Module, site: Site, site_plan: SitePlan, stats: Statistics, recipe: Recipe) -> Fold:
    """The compensation of a plan that was read from a file."""
    if isinstance(site, AttentionSite):
        return fold_attention(site, site_plan, HeadSums.of(site, stats), recipe)
    return fold_linear(site, site_plan, projection_at(model, site.down), stats.moments_of(site.name), recipe)
