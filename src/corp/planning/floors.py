"""The smallest widths of sites under QK-norm: below them the lengths of heads can no longer be predicted."""

from __future__ import annotations

from dataclasses import replace

from corp.calibration import workers
from corp.calibration.statistics import Statistics
from corp.planning.normed import LIMIT, least_width
from corp.planning.widths import width_of
from corp.recipe import Recipe
from corp.sites import AttentionSite, Sites, at_site


def with_floors(sites: Sites, stats: Statistics, recipe: Recipe) -> Sites:
    """The sites, with a smallest width for those under QK-norm that the recipe may narrow."""
    wanted = [site for site in sites.attention if _needs_floor(site, sites, recipe)]
    if not wanted:
        return sites

    def work(site: AttentionSite) -> AttentionSite:
        with at_site(site):
            return replace(site, least=least_width(site, stats.pairs_of(site.name), recipe))

    found = workers.current().map(work, wanted, lambda site: float(site.heads * site.width**3))
    return sites.replacing({site.name: site for site in found})


def _needs_floor(site: AttentionSite, sites: Sites, recipe: Recipe) -> bool:
    """Whether the site has a norm, no floor yet, and dimensions to lose."""
    if site.norm is None or site.least or recipe.skips(site.name):
        return False
    return recipe.has_target or width_of(site, sites, recipe) < site.width


def raised(sites: Sites, recipe: Recipe) -> list[str]:
    """A sentence if floors make attentions keep more than requested; a target requests no widths."""
    if recipe.has_target:
        return []
    free = sites.replacing({site.name: replace(site, least=0) for site in sites.attention})
    widths = [
        (site, width_of(free[site.name], free, recipe), width_of(site, sites, recipe)) for site in sites.attention
    ]
    more = [one for one in widths if one[1] < one[2]]
    if not more:
        return []
    site, asked, kept = more[0]
    others = f"; {len(more) - 1} other attentions keep more than was asked for too" if len(more) > 1 else ""
    return [
        f"{site.name} keeps {kept} of {site.width} dimensions per head instead of {asked}: with fewer, the length that "
        f"QK-norm divides by is predicted to no better than {LIMIT:.0%}{others}"
    ]
