"""How wide every site stays: what a recipe's shares, multiples and equal heads come to."""

from __future__ import annotations

from corp.errors import RecipeError
from corp.recipe import Recipe, kept_width
from corp.sites import AttentionSite, Site, Sites, ValueSite


def width_of(site: Site, sites: Sites, recipe: Recipe) -> int:
    """The width that the recipe leaves this site, per head where it has heads."""
    if isinstance(site, ValueSite) and recipe.equal_heads:
        return _as_wide_as_queries(site, sites, recipe)
    sparsity = 0.0 if recipe.skips(site.name) else recipe.sparsity(site.kind, site.name)
    return narrowed(site, sparsity, recipe.multiple(site.kind))


def narrowed(site: Site, sparsity: float, multiple: int = 1) -> int:
    """Rotated dimensions come in whole pairs, and rotated and others lose the same share."""
    if not isinstance(site, AttentionSite):
        return kept_width(site.width, sparsity, multiple)
    plain = kept_width(site.plain_width, sparsity, multiple) if site.plain_width else 0
    turned = 2 * kept_width(site.rotary_dims // 2, sparsity, -(-multiple // 2)) if site.rotary_dims else 0
    return turned + plain


def rotated_part(site: AttentionSite, keep: int) -> int:
    """How many of `keep` dimensions are rotated ones: their share, in whole pairs."""
    if not site.plain_width:
        return keep
    share = -(-keep * site.rotary_dims // (2 * site.width))  # rounded up
    return 2 * min(share, (keep - 1) // 2)


def _as_wide_as_queries(site: ValueSite, sites: Sites, recipe: Recipe) -> int:
    queries = sites.get(site.attention)
    if queries is None:
        raise RecipeError(
            f"equal_heads: queries and keys of {site.attention} cannot be pruned, so values cannot follow them; "
            f"leave it alone with skip=[{site.name!r}]"
        )
    return site.width if recipe.skips(site.name) else min(site.width, width_of(queries, sites, recipe))
