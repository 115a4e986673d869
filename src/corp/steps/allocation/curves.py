"""The predicted error of every site at every width, and the best widths within a budget.

Errors of different layers are made comparable by the residual stream they are added to: each error is divided by a
power of that stream's energy. Errors of queries and keys are errors of logits, not of outputs, so they are not compared
with the others: all queries and keys lose one share, and the rest of the budget is allocated over MLPs and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from corp.calibration import workers
from corp.calibration.moments import Moments
from corp.calibration.statistics import Statistics
from corp.io.observer import Observer
from corp.numerics import affine, exact, values
from corp.numerics.allocate import Option, share
from corp.planning.fitting import fit_solvable, split
from corp.planning.linear import Layer, layer_of, uses_intercept
from corp.planning.planners import cost_of
from corp.planning.widths import multiple_of, narrowed, width_of
from corp.recipe import Recipe
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, Sites, ValueSite, projection_at
from corp.steps.allocation.budget import Budget

LEAST = 1 / 12  # of a site's width is always kept: the curve of a single site is unreliable for the last channels
GROWTH = 16  # of the stream's energy from block to block, above which errors are divided by the whole energy
VALUE_WIDTHS = 8  # widths at which the error of values is computed; between them it is interpolated


class Curve(NamedTuple):
    """One site's predicted output error, and the energy of the residual stream that it adds to."""

    errors: Tensor  # (D + 1,), at width 0, 1 … D
    energy: float
    path: exact.Path | None = None  # of an MLP: which channels are removed at every width


def site_curves(
    model: nn.Module, sites: Sites, stats: Statistics, recipe: Recipe, observer: Observer
) -> dict[str, Curve]:
    """The curve of every MLP and of all values that the recipe does not skip."""
    wanted = [site for site in sites if not isinstance(site, AttentionSite) and not recipe.skips(site.name)]
    with observer.stage("error curves", len(wanted), "sites") as advance:

        def work(site: LinearSite) -> Curve:
            curve = _curve(model, site, stats, recipe)
            advance(1)
            return curve

        found = workers.current().map(work, wanted, lambda site: cost_of(site, stats.samples))
    return {site.name: curve for site, curve in zip(wanted, found, strict=True)}


def _curve(model: nn.Module, site: LinearSite, stats: Statistics, recipe: Recipe) -> Curve:
    down, moments = projection_at(model, site.down), stats.moments_of(site.name).total()
    layer = layer_of(down, moments, uses_intercept(recipe, down.bias is not None))
    energy = moments.stream_energy
    if energy is None:  # a layer outside of all blocks: the energy of its own output
        energy = affine.output_energy(layer.W, moments.mean, moments.cov())
    energy = max(energy, torch.finfo(torch.float64).tiny)
    if isinstance(site, ValueSite):
        return Curve(_value_errors(site, layer, recipe), energy)
    path = exact.elimination_path(layer.W, layer.cov, ridge=recipe.ridge)
    return Curve(path.by_width() * _routed(site, moments), energy, path)


def _routed(site: LinearSite, moments: Moments) -> float:
    """The share of the stream's tokens that an expert sees."""
    tokens = float(moments.stream[1])
    return min(1.0, moments.seen / tokens) if getattr(site, "experts", None) and tokens else 1.0


def _value_errors(site: ValueSite, layer: Layer, recipe: Recipe) -> Tensor:
    """The predicted squared output error of the values alone at width 0, 1 … D, compensated."""
    basis = values.value_basis(layer.W, layer.cov, site.heads, site.groups, site.width, ridge=recipe.ridge)
    rotated = Layer(*values.rotate(*layer, basis, site.heads))
    steps = min(VALUE_WIDTHS, site.width)
    known = sorted({round(i * site.width / steps) for i in range(1, steps + 1)})
    errors = [affine.output_energy(layer.W, torch.zeros_like(layer.mean), layer.cov)]
    for keep in known:
        kept = values.kept_inputs([torch.arange(keep)] * site.groups, site.width, site.heads)
        pruned = split(site.inputs, kept)
        given = affine.removal(*rotated, kept, pruned)
        errors.append(affine.error(given, fit_solvable(given, "full", recipe.ridge)[0]))
    every = np.interp(np.arange(site.width + 1), [0, *known], errors)
    return torch.from_numpy(every)


def usual_power(curves: Mapping[str, Curve]) -> float:
    """The power of the stream's energy by which errors are divided.

    A half is better if that energy varies little from block to block (DeiT), one if it grows a hundredfold (a small
    Llama), and each is much worse on the other model.
    """
    known = [curve.energy for curve in curves.values()]
    return 1.0 if known and max(known) > GROWTH * min(known) else 0.5


def comparable(
    curves: Mapping[str, Curve], power: float | None, rates: Mapping[str, float] | None
) -> dict[str, Tensor]:
    """Every site's errors in a common unit: times measured rates, or divided by a power of the stream's energy.

    With both, the unit is their geometric mean. A site without a rate has no errors to scale.
    """
    scales = [] if power is None else [{name: curve.energy**-power for name, curve in curves.items()}]
    scales += [] if rates is None else [{name: rates.get(name, 1.0) for name in curves}]
    means = {name: math.prod(scale[name] for scale in scales) ** (1 / len(scales)) for name in curves}
    return {name: curve.errors * means[name] for name, curve in curves.items()}


def allocate(
    curves: Mapping[str, Tensor],
    sites: Sites,
    budget: Budget,
    recipe: Recipe,
    equal: Mapping[str, int],
    query_shares: Iterable[float],
    most: float = 1.0,
) -> tuple[dict[str, int], float]:
    """The best widths within the budget, and the first of `query_shares` that leaves room for the other sites.

    `curves` are comparable errors of every site at width 0, 1 … D. `equal` are widths that meet the budget, and no
    floor is above them. No MLP loses more than the share `most`.
    """
    shares = list(query_shares)
    for queries in shares:
        fixed = fixed_widths(sites, recipe, queries)
        options = {
            site.name: _option(site, curves[site.name], budget, recipe, equal[site.name], most)
            for site in sites
            if site.name in curves and site.name not in fixed
        }
        spare = budget.limit - budget.cost(sites, {**fixed, **dict.fromkeys(options, 0)})  # width 0 costs nothing
        if queries == shares[-1] or sum(option.cost(option.floor) for option in options.values()) <= spare:
            break
    groups = _groups(sites, options)
    found = share([_joined([options[name] for name in group]) for group in groups], spare)
    widths = {name: width for group, width in zip(groups, found, strict=True) for name in group}
    return {**fixed, **{name: widths[name] for name in options}}, queries


def _groups(sites: Sites, options: Iterable[str]) -> list[list[str]]:
    """Groups of sites that must have one width: experts of one module that are equally wide; all others alone."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in options:
        groups.setdefault((getattr(sites[name], "experts", None) or name, sites[name].width), []).append(name)
    return list(groups.values())


def _joined(options: list[Option]) -> Option:
    """Several sites of equal width as one option."""
    first = options[0]
    if len(options) == 1:
        return first
    errors, price = sum((o.errors for o in options[1:]), first.errors), sum((o.price for o in options[1:]), first.price)
    ceilings = [o.ceiling for o in options if o.ceiling is not None]
    return Option(errors, price, max(o.floor for o in options), min(ceilings, default=None), first.multiple)


def fixed_widths(sites: Sites, recipe: Recipe, queries: float) -> dict[str, int]:
    """The widths that are not allocated: of skipped sites, of exact overrides, and of all queries and keys."""
    asked = recipe.with_shares(attn=queries)
    return {
        site.name: width_of(site, sites, asked)
        for site in sites
        if isinstance(site, AttentionSite)
        or (isinstance(site, ValueSite) and recipe.equal_heads)
        or recipe.skips(site.name)
        or len(set(recipe.limits(site.kind, site.name))) == 1
    }


def _option(site: Site, errors: Tensor, budget: Budget, recipe: Recipe, equal: int, of_mlps: float) -> Option:
    multiple = multiple_of(site, recipe)
    least, most = recipe.limits(site.kind, site.name)
    if isinstance(site, MLPSite):
        most = max(least, min(most, of_mlps))
    floor = max(1, min(round(LEAST * site.width), equal))
    if most < 1:
        floor = max(floor, narrowed(site, most, multiple))
    # Rounded to multiples already, so that the floors cost exactly what the smallest widths cost.
    floor = min(equal, -(-floor // multiple) * multiple)
    return Option(errors, budget.price(site), floor, narrowed(site, least, multiple), multiple=multiple)
