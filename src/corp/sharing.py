"""Sharing a budget out over sites: who keeps how much, by what the next unit is predicted to be worth there.

Every site has a curve, its predicted output error at every width, and errors of different layers are made comparable by
the size of the stream they are added to: an error counts relative to that energy. Queries and keys are measured in
logits and not in outputs, so they are not weighed against the others: they all lose one share, and what they leave of
the budget is shared out over MLPs and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from corp.budget import Budget, budget_of, uniform
from corp.fitting import fit_mlp, moments_for_fit, split
from corp.numerics import affine, values
from corp.numerics.allocate import Option, share
from corp.planning.linear import Layer, in_basis, uses_intercept, whole_path
from corp.recipe import UNIFORM, Recipe
from corp.sites import AttentionSite, LinearSite, Sites, ValueSite
from corp.stats import Statistics
from corp.surgery.linear import projection_at
from corp.widths import width_of

QUERIES = 0.5  # share of every head's Q/K dimensions that go: as a subspace they cost little
LEAST = 1 / 12  # of a site's width is always kept: curves are of one site alone, and say little of the last channels
VALUE_WIDTHS = 8  # widths at which the error of values is computed; between them the curve is drawn straight


def choose_widths(model: nn.Module, sites: Sites, stats: Statistics, recipe: Recipe) -> dict[str, int]:
    """How wide every site stays."""
    budget = budget_of(model, sites, recipe, stats.inputs)
    asked = recipe if budget is None else uniform(sites, recipe, budget)
    widths = {site.name: width_of(site, sites, asked) for site in sites}
    if budget is None or recipe.allocate == UNIFORM:
        return widths
    return Curves(model, sites, stats, recipe).widths(sites, budget, fixed_widths(sites, recipe, QUERIES), recipe)


def fixed_widths(sites: Sites, recipe: Recipe, queries: float) -> dict[str, int]:
    """The widths that are not shared out: of what is skipped or overridden, and of queries and keys, which all lose one
    share."""
    asked = replace(recipe, target_macs=None, target_params=None, attn=queries)
    return {
        site.name: width_of(site, sites, asked)
        for site in sites
        if isinstance(site, AttentionSite)
        or (isinstance(site, ValueSite) and recipe.equal_heads)
        or recipe.skips(site.name)
        or recipe.overridden(site.kind, site.name)
    }


class Curves:
    """The curve of every site that a budget can be shared out over, weighted; made once, used for every split."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        stats: Statistics,
        recipe: Recipe,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.errors: dict[str, Tensor] = {}  # (D + 1,) each, at width 0, 1 … D
        for site in sites:
            if not isinstance(site, AttentionSite) and not recipe.skips(site.name):
                self.errors[site.name] = curve(model, site, stats, recipe) * weight(model, site, stats)
                if progress:
                    progress(1)

    def widths(self, sites: Sites, budget: Budget, fixed: dict[str, int], recipe: Recipe) -> dict[str, int]:
        """The best widths within the budget, once the sites of `fixed` have theirs."""
        free = [site for site in sites if site.name in self.errors and site.name not in fixed]
        options = [
            Option(
                self.errors[site.name],
                budget.unit(site.name),
                floor=max(1, round(LEAST * site.width)),
                multiple=recipe.multiple(site.kind),
            )
            for site in free
        ]
        full = {site.name: site.width for site in free}
        spare = budget.limit - budget.cost(sites, fixed) + sum(budget.unit(name) * w for name, w in full.items())
        found = share(options, spare)
        return {**fixed, **{site.name: width for site, width in zip(free, found, strict=True)}}


def weight(model: nn.Module, site: LinearSite, stats: Statistics) -> float:
    """What an error at this site counts: 1 / energy of the stream it is added to, or of its own output.

    1 / sqrt(energy) does a little better where that energy hardly varies (DeiT), and far worse where it grows a
    hundredfold (a small Llama).
    """
    sums = stats.moments_of(site.name).all
    energy = sums.stream_energy
    if energy is None:
        W = projection_at(model, site.down).weight.cpu().double()
        energy = affine.output_energy(W, sums.mean, sums.cov)
    return 1 / max(energy, torch.finfo(torch.float64).tiny)


def curve(model: nn.Module, site: LinearSite, stats: Statistics, recipe: Recipe) -> Tensor:
    """The predicted squared output error of one site alone at width 0, 1 … D, compensated."""
    down = projection_at(model, site.down)
    moments = stats.moments_of(site.name).all
    mean, cov = moments_for_fit(moments, uses_intercept(recipe, down.bias is not None))
    layer = Layer(down.weight.cpu().double(), mean, cov)
    if isinstance(site, ValueSite):
        return _value_curve(site, layer, recipe)
    # Exact elimination removes one channel after the other and knows what each costs.
    return whole_path(layer, recipe, stats.fits.setdefault(site.name, {})).by_width()


def _value_curve(site: ValueSite, layer: Layer, recipe: Recipe) -> Tensor:
    basis = values.value_basis(layer.W, layer.cov, site.heads, site.groups, site.width, ridge=recipe.ridge_given)
    turned = in_basis(*layer, basis, site.heads)
    steps = min(VALUE_WIDTHS, site.width)
    known = sorted({round(i * site.width / steps) for i in range(1, steps + 1)})
    errors = [affine.output_energy(layer.W, torch.zeros_like(layer.mean), layer.cov)]
    for keep in known:
        kept = values.kept_inputs([torch.arange(keep)] * site.groups, site.width, site.heads)
        pruned = split(site.inputs, kept)
        fit = fit_mlp(turned.mean, turned.cov, kept, pruned, "full", recipe.ridge_given)
        errors.append(affine.error(*turned, kept, pruned, fit))
    return _between([0, *known], errors)


def _between(widths: list[int], errors: list[float]) -> Tensor:
    """The curve at every width, straight between those that are known."""
    parts = []
    for low, high, start, end in zip(widths, widths[1:], errors, errors[1:], strict=False):
        part = torch.linspace(start, end, high - low + 1, dtype=torch.float64)
        parts.append(part[:-1])
    return torch.cat([*parts, torch.tensor(errors[-1:], dtype=torch.float64)])
