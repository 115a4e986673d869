"""The width that every site keeps, from a recipe's shares, multiples and equal heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from corp.errors import PlanError, RecipeError
from corp.recipe import AUTO, Recipe, kept_width
from corp.sites import AttentionSite, MLPSite, Refusal, Site, Sites, ValueSite, and_others

Entry = TypeVar("Entry", Site, Refusal)
NAMES = {"mlp": "MLPs", "attn": "queries and keys", "vo": "values"}
WHOLE = 7 / 8  # heads that would keep more are not narrowed under round_to="auto": they would be slower
EXPERTS = 8  # numbers of two bytes or more fill 16 bytes


def width_of(site: Site, sites: Sites, recipe: Recipe) -> int:
    """The width that the recipe leaves this site, per head if it has heads."""
    if isinstance(site, ValueSite) and recipe.equal_heads:
        return _as_wide_as_queries(site, sites, recipe)
    sparsity = 0.0 if recipe.skips(site.name) else recipe.sparsity(site.kind, site.name)
    kept, multiple = narrowed(site, sparsity, multiple_of(site, recipe)), recipe.multiple(site.kind, site.width)
    whole = recipe.round_to == AUTO and multiple > 1 and not isinstance(site, MLPSite) and kept > WHOLE * site.width
    return site.width if whole else kept


def not_as_requested(sites: Sites, recipe: Recipe) -> list[str]:
    """A sentence on everything that the recipe requests of this whole model and that it cannot get."""
    return [*rounded_away(sites, recipe), *not_found(sites, recipe), *left_whole(sites, recipe)]


def rounded_away(sites: Sites, recipe: Recipe) -> list[str]:
    """A sentence if default rounding cancels all that was requested of some sites."""
    if recipe.has_target or recipe.round_to != AUTO:
        return []
    exact = replace(recipe, round_to=1)
    lost = [s for s in sites if width_of(s, sites, recipe) == s.width > width_of(s, sites, exact)]
    if not lost:
        return []
    return [
        f"{and_others(lost)} keep their width of {lost[0].width}: {width_of(lost[0], sites, exact)} would be rounded "
        f"up to it, because odd widths are slow; remove more, or give round_to=1"
    ]


def not_found(sites: Sites, recipe: Recipe) -> list[str]:
    """A sentence for every kind of site for which the recipe has a share but the model has no site."""
    kinds = {entry.kind for entry in (*sites, *sites.refused)}
    asked = {} if recipe.has_target else {kind: getattr(recipe, kind) for kind in NAMES}
    lost = [layer for layer in sites.layers if layer.reason.endswith("that was recognised")]
    some = f"; {len(lost)} layers of its blocks were not recognised: {lost[0].name}, …" if lost else ""
    return [
        f"{kind}={share:g} changes nothing: no {NAMES[kind]} were found in this model{some}"
        for kind, share in asked.items()
        if share and kind not in kinds
    ]


def multiple_of(site: Site, recipe: Recipe) -> int:
    """What a site's width is a multiple of; grouped kernels, which run packed experts, need 16 bytes."""
    asked = recipe.multiple(site.kind, site.width)
    return math.lcm(asked, EXPERTS) if isinstance(site, MLPSite) and site.experts else asked


def narrowed(site: Site, sparsity: float, multiple: int = 1) -> int:
    """The width at this sparsity; rotated dimensions stay in whole pairs, and lose the same share as others."""
    if not isinstance(site, AttentionSite):
        return kept_width(site.width, sparsity, multiple)
    if site.least:
        sparsity = min(sparsity, 1 - site.least / site.width)
    plain = kept_width(site.plain_width, sparsity, multiple) if site.plain_width else 0
    rotated = 2 * kept_width(site.rotary_dims // 2, sparsity, -(-multiple // 2)) if site.rotary_dims else 0
    return rotated + plain


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


def require_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise PlanError(f"recipe must be a corp.Recipe, not {type(recipe).__name__}")


def require_prunable(sites: Sites, recipe: Recipe) -> None:
    """Refuse a request if none of the requested sites can be pruned; a target requests no site by name.

    If only some of them cannot, `not_as_requested` reports those. Heads of equal widths are pruned all or not at all.
    """
    require_recipe(recipe)
    if not len(sites) and sites.output is None:
        raise PlanError(f"nothing in this model can be pruned: {_reasons(sites.refused)}")
    names = [entry.name for entry in (*sites, *sites.refused)]
    for glob in (*recipe.skip, *recipe.overrides):
        if not any(fnmatchcase(name, glob) for name in names):
            some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise PlanError(f"the glob {glob!r} matches no site; they are called {some}")
    if recipe.has_target:
        return
    for request in _requests(recipe):
        refused = _asked(sites.refused, recipe, request)
        if refused and (recipe.equal_heads or not _asked(sites, recipe, request)):
            kinds = " and ".join(f"{kind}=0" for kind in dict.fromkeys(r.kind for r in refused))
            raise PlanError(
                f"cannot prune {_reasons(refused)}. Leave them alone with skip=[...] over their names, or {kinds}"
            )


def left_whole(sites: Sites, recipe: Recipe) -> list[str]:
    """A sentence for every kind of site of which only some can be pruned as requested."""
    if recipe.has_target:
        return []
    notes = []
    for kind, what in NAMES.items():
        refused = _asked(sites.refused, recipe, (kind, "*"))
        total = len(refused) + len(_asked(sites, recipe, (kind, "*")))
        if refused:
            share = f"{len(refused)} of {total} {what}"
            notes.append(f"{share} keep their width, because they cannot be pruned: {_reasons(refused)}")
    return notes


def _requests(recipe: Recipe) -> list[tuple[str, str]]:
    """What a recipe requests: kinds of sites, each with the names (a glob) that it applies to."""
    overridden = [(kind, glob) for glob, changes in recipe.overrides.items() for kind in changes]
    return [*((kind, "*") for kind in NAMES), *overridden]


def _asked(entries: Iterable[Entry], recipe: Recipe, request: tuple[str, str]) -> list[Entry]:
    """The sites or refusals that a request applies to: those of its kind and name, not skipped, with a share."""
    kind, glob = request
    found = [entry for entry in entries if entry.kind == kind and fnmatchcase(entry.name, glob)]
    return [entry for entry in found if not recipe.skips(entry.name) and recipe.sparsity(kind, entry.name) > 0]


def _reasons(refused: Sequence[Refusal]) -> str:
    """The first few refusals, and how many more there are."""
    some = "; ".join(f"{r.name} ({r.kind}): {r.reason}" for r in refused[:3])
    return f"{some} and {len(refused) - 3} more" if len(refused) > 3 else some
