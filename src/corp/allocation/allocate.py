"""Sharing a budget out over sites: who keeps how much, by what the next unit is predicted to be worth there.

Every site has a curve, its predicted output error at every width, and errors of different layers are made comparable by
the size of the stream they are added to: an error counts relative to a power of that energy. Queries and keys are
measured in logits and not in outputs, so they are not weighed against the others: they all lose one share, and what
they leave of the budget is shared out over MLPs and values. Share and power follow a rule (query_share, usual_power),
or are given: corp.prune, which has data, tries some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from corp.allocation.budget import Budget, budget_of, uniform
from corp.allocation.latency import Clock
from corp.calibration.statistics import Statistics
from corp.numerics import affine, exact, values
from corp.numerics.allocate import Option, share
from corp.planning.fitting import fit_mlp, split
from corp.planning.linear import Layer, in_basis, layer_of, uses_intercept, whole_path
from corp.planning.widths import narrowed, width_of
from corp.recipe import KINDS, UNIFORM, Recipe
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, Sites, ValueSite, projection_at

LEAST = 1 / 12  # of a site's width is always kept: curves are of one site alone, and say little of the last channels
GROWTH = 16  # of the stream's energy from block to block, above which errors count relative to it
ROUNDS = 3  # times that a result is timed, and made smaller where it is not fast enough
OVER = 1.1  # what a result is too slow by, and a little more, is taken off the next aim
VALUE_WIDTHS = 8  # widths at which the error of values is computed; between them the curve is drawn straight


class Shared(NamedTuple):
    """How wide every site stays, and why: what goes on record in the plan."""

    widths: dict[str, int]
    why: dict[str, Any]


class Sharing:
    """Shares budgets of one model out; what does not depend on the budget is computed once."""

    def __init__(self, model: nn.Module, sites: Sites, stats: Statistics) -> None:
        self.model, self.sites, self.stats = model, sites, stats
        self.curves: Curves | None = None
        self._of: object = None  # what of the recipe the curves depend on
        self.clock: Clock | None = None

    def share(self, recipe: Recipe, queries: float | None = None, power: float | None = None) -> Shared:
        """By the recipe; `queries` is the share of Q/K dimensions that go, `power` how errors count, where they are not
        left to the rules."""
        if recipe.target_latency is not None:
            return self._in_time(recipe, queries, power)
        budget = budget_of(self.model, self.sites, recipe, self.stats.inputs)
        if budget is None:
            return Shared({site.name: width_of(site, self.sites, recipe) for site in self.sites}, {})
        return self._within(budget, recipe, queries, power)

    def _in_time(self, recipe: Recipe, queries: float | None, power: float | None) -> Shared:
        """Within a measured table of times; the result is timed, and made smaller where the table promised too much."""
        if self.clock is None:
            self.clock = Clock(self.model, self.sites, self.stats.inputs, recipe)
        clock, wanted = self.clock, recipe.target_latency
        assert wanted is not None  # why this was called
        aim, recipe = wanted, clock.without_idle(recipe)
        for left in reversed(range(ROUNDS)):
            shared = self._within(clock.budget(aim), recipe, queries, power)
            predicted, measured = clock.predicted(shared.widths), clock.time(shared.widths)
            if measured.value <= wanted or not left:
                break
            aim -= OVER * (measured.value - wanted)
        record = {**clock.record(), "aimed_at": aim, "predicted": predicted, "measured": measured._asdict()}
        why = {"sharing": {**shared.why["sharing"], "target": wanted}, "latency": record}
        return Shared(shared.widths, why)

    def _within(self, budget: Budget, recipe: Recipe, queries: float | None, power: float | None) -> Shared:
        asked = uniform(self.sites, recipe, budget)
        widths = {site.name: width_of(site, self.sites, asked) for site in self.sites}
        why = {"budget": budget.what, "target": budget.share, "allocate": recipe.allocate, "equal_share": asked.mlp}
        if recipe.allocate != UNIFORM:
            if self.curves is None or self._of != (recipe.skip, recipe.ridge_given, recipe.intercept):
                self.curves = Curves(self.model, self.sites, self.stats, recipe)
                self._of = recipe.skip, recipe.ridge_given, recipe.intercept
            wanted = query_share(asked.mlp) if queries is None else queries
            power = usual_power(self.curves.energies.values()) if power is None else power
            widths, taken = self.curves.share(self.sites, budget, recipe, widths, (wanted, asked.mlp), power)
            why |= {"queries": taken, "power": power}
        return Shared(widths, {"sharing": {**why, "removed": removed(self.sites, widths)}})


def query_share(equal: float) -> float:
    """How much of Q/K goes under a budget that equal shares of MLP and Q/K, `equal` each, would meet.

    As a subspace Q/K costs little at first and much at the end: more than the others under a mild budget, less under a
    hard one. The line is what did best on DeiT-Tiny between 0.35 and 0.9 of its operations (docs/budgets.md).
    """
    return min(3 * equal, 0.25 + 0.5 * equal)


def usual_power(energies: Iterable[float]) -> float:
    """By which power of the stream's energy errors are divided.

    A half does better where that energy varies little from block to block (DeiT), one where it grows a hundredfold (a
    small Llama), and each does much worse on the other.
    """
    known = list(energies)
    return 1.0 if known and max(known) > GROWTH * min(known) else 0.5


def removed(sites: Sites, widths: dict[str, int]) -> dict[str, float]:
    """The share that each kind of site loses, all its sites together."""
    found = {}
    for kind in KINDS:
        own = [site for site in sites if site.kind == kind]
        if own:
            found[kind] = 1 - sum(widths[site.name] for site in own) / sum(site.width for site in own)
    return found


def fixed_widths(sites: Sites, recipe: Recipe, queries: float) -> dict[str, int]:
    """The widths that are not shared out: of what is skipped or told exactly, and of queries and keys, which all lose
    one share."""
    asked = recipe.with_shares(attn=queries)
    return {
        site.name: width_of(site, sites, asked)
        for site in sites
        if isinstance(site, AttentionSite)
        or (isinstance(site, ValueSite) and recipe.equal_heads)
        or recipe.skips(site.name)
        or len(set(recipe.limits(site.kind, site.name))) == 1
    }


class Curves:
    """The curve of every site that a budget can be shared out over; made once, used for every split."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        stats: Statistics,
        recipe: Recipe,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.errors: dict[str, Tensor] = {}  # (D + 1,) each, at width 0, 1 … D
        self.energies: dict[str, float] = {}  # of the stream that each adds to
        self.paths: dict[str, exact.Path] = {}  # of MLPs
        for site in sites:
            if not isinstance(site, AttentionSite) and not recipe.skips(site.name):
                down = projection_at(model, site.down)
                moments = stats.moments_of(site.name).all
                layer = layer_of(down, moments, uses_intercept(recipe, down.bias is not None))
                if isinstance(site, MLPSite):
                    # Exact elimination removes one channel after the other and knows what each costs.
                    path = whole_path(layer, recipe, stats.fits.setdefault(site.name, {}))
                    self.paths[site.name], self.errors[site.name] = path, path.by_width()
                else:
                    self.errors[site.name] = _value_curve(site, layer, recipe)
                self.energies[site.name] = stream_energy(model, site, stats)
                if progress:
                    progress(1)

    def share(
        self,
        sites: Sites,
        budget: Budget,
        recipe: Recipe,
        equal: dict[str, int],
        queries: tuple[float, ...],
        power: float,
    ) -> tuple[dict[str, int], float]:
        """The best widths within the budget, with the first share of `queries` that leaves room for the other sites.

        `equal` are widths that meet the budget: no floor is above them.
        """
        for wanted in queries:
            fixed = fixed_widths(sites, recipe, wanted)
            options = {
                site.name: self._option(site, budget, recipe, equal[site.name], power)
                for site in sites
                if site.name in self.errors and site.name not in fixed
            }
            spare = budget.limit - budget.cost(sites, {**fixed, **dict.fromkeys(options, 0)})  # at no width, no cost
            if wanted == queries[-1] or sum(option.cost(option.floor) for option in options.values()) <= spare:
                break
        found = share(list(options.values()), spare)
        return {**fixed, **dict(zip(options, found, strict=True))}, wanted

    def _option(self, site: Site, budget: Budget, recipe: Recipe, equal: int, power: float) -> Option:
        multiple = recipe.multiple(site.kind)
        least, most = recipe.limits(site.kind, site.name)
        floor = max(1, min(round(LEAST * site.width), equal))
        if most < 1:
            floor = max(floor, narrowed(site, most, multiple))
        # In whole multiples already, so that what the floors cost is what the smallest widths cost.
        floor = min(equal, -(-floor // multiple) * multiple)
        errors = self.errors[site.name] / self.energies[site.name] ** power
        return Option(errors, budget.price(site), floor, narrowed(site, least, multiple), multiple=multiple)


def stream_energy(model: nn.Module, site: LinearSite, stats: Statistics) -> float:
    """Of the stream that the site adds to, or of its own output where there is none."""
    sums = stats.moments_of(site.name).all
    energy = sums.stream_energy
    if energy is None:
        W = projection_at(model, site.down).weight.cpu().double()
        energy = affine.output_energy(W, sums.mean, sums.cov)
    return max(energy, torch.finfo(torch.float64).tiny)


def _value_curve(site: ValueSite, layer: Layer, recipe: Recipe) -> Tensor:
    """The predicted squared output error of the values alone at width 0, 1 … D, compensated."""
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
    every = np.interp(np.arange(site.width + 1), [0, *known], errors)  # straight between those that are known
    return torch.from_numpy(every)
