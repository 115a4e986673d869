"""The widths of all sites under a recipe: given shares, equal shares of a budget, or allocation by marginal gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from torch import nn

from corp.calibration.statistics import Statistics
from corp.errors import PlanError
from corp.io.observer import SILENT, Observer
from corp.numerics.exact import Path
from corp.numerics.output import Spectrum
from corp.numerics.subspace import Subspace
from corp.planning.floors import raised, with_floors
from corp.planning.heads import nested_maps
from corp.planning.output import spectrum_of
from corp.planning.widths import width_of
from corp.recipe import GAIN, KINDS, SUBSPACE, UNIFORM, Recipe
from corp.sites import Sites, projection_at
from corp.steps.allocation.budget import Budget, Sample, count_budget, one_sample, uniform
from corp.steps.allocation.curves import Curve, allocate, comparable, site_curves, usual_power
from corp.steps.allocation.latency import Clock, Time
from corp.steps.allocation.output_head import count_positions, output_rank, saved_by

ROUNDS = 3  # how often a result is timed, and made smaller if it is not fast enough
OVER = 1.1  # the next target is lowered by a slow result's excess and a little more


Made = TypeVar("Made")


class Way(NamedTuple):
    """How a target is met; for values of None, the rules decide."""

    queries: float | None = None  # the share of Q/K dimensions to remove
    power: float | None = None  # of the stream's energy, by which errors are divided; None beside rates: by none
    output: float | None = None  # the share of the output head's rank to remove
    spread: float | None = None  # how many times the equal share one MLP may lose
    rates: Mapping[str, float] | None = None  # measured divergence per unit of error, which multiplies errors


RULES = Way()


class Allocation(NamedTuple):
    """The width of every site, the reasons (for the plan's record), and the elimination paths computed on the way."""

    widths: Mapping[str, int]
    why: Mapping[str, Any]
    paths: Mapping[str, Path] = {}
    rank: int | None = None  # of the output head, if it is factored


def once(method: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """A method that takes long: its result is kept for later calls on the same object."""
    name = f"_{method.__name__}_made"

    @wraps(method)
    def made(self: Any) -> Made:
        if name not in vars(self):
            setattr(self, name, method(self))
        found: Made = getattr(self, name)
        return found

    return made


class Allocator:
    """Widths of one model under variations of one recipe; what does not depend on the target is computed once."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        stats: Statistics,
        recipe: Recipe,
        observer: Observer = SILENT,
        sample: Sample | None = None,
        curves: Mapping[str, Curve] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.model, self.stats, self.recipe, self.observer = model, stats, recipe, observer
        self.sites = with_floors(sites, stats, recipe)
        self.given = sample  # to count operations on, if statistics do not record the model's inputs
        self._counted = {} if budget is None else {budget.what: budget}  # the dense model, counted once
        self._known = curves  # if they were computed before, one block at a time

    @once
    def curves(self) -> dict[str, Curve]:
        if self._known is not None:
            return dict(self._known)
        return site_curves(self.model, self.sites, self.stats, self.recipe, self.observer)

    @once
    def nested(self) -> dict[str, list[Subspace]]:
        """The nested maps of every attention that has dimensions to map; they serve trials of any width."""
        if self.recipe.attn_basis != SUBSPACE:
            return {}
        plain = [site for site in self.sites.attention if site.plain_width and not self.recipe.skips(site.name)]
        return {site.name: nested_maps(site, self.stats.grams_of(site.plain_name).total()) for site in plain}

    @once
    def spectrum(self) -> Spectrum:
        """The leading directions of the output head."""
        assert self.sites.output is not None
        name = self.sites.output.name
        return spectrum_of(projection_at(self.model, name), self.stats.moments_of(name).total())

    @once
    def clock(self) -> Clock:
        return Clock(self.model, self.sites, self.sample, self.recipe)

    @property
    def sample(self) -> Sample:
        """What operations are counted and times measured on."""
        return self.given or one_sample(self.model, self.stats.inputs)

    @property
    def counts_macs(self) -> bool:
        return self.given is not None or self.stats.inputs is not None

    def paths(self) -> dict[str, Path]:
        """The elimination paths of MLPs; none if the allocator's own recipe needs no curves."""
        curves = self.curves() if self.recipe.allocate == GAIN else {}
        return {name: curve.path for name, curve in curves.items() if curve.path is not None}

    def budget(self, what: str, share: float) -> Budget:
        """The budget for this share; the dense model is counted once."""
        if what not in self._counted:
            self._counted[what] = count_budget(self.model, self.sites, what, None if what == "params" else self.sample)
        return replace(self._counted[what], share=share)

    def allocate(self, recipe: Recipe, way: Way = RULES) -> Allocation:
        """The widths under this recipe, a variation of the allocator's own in its target or its way of allocation."""
        rank = self.output_rank(recipe.output or way.output or 0.0)
        if recipe.min_agreement is not None:
            raise PlanError(
                "min_agreement is measured on batches that are held out of calibration, and statistics hold none: use "
                "corp.prune(model, batches, recipe), or give a target"
            )
        if recipe.target_latency is not None:
            return self._in_time(recipe, recipe.target_latency, way)._replace(rank=rank)
        for what in ("params", "macs"):
            target = getattr(recipe, f"target_{what}")
            if target is not None:
                budget = replace(self.budget(what, target), spared=self.spared(what, rank))
                return self._within(budget, recipe, way)._replace(rank=rank)
        widths = {site.name: width_of(site, self.sites, recipe) for site in self.sites}
        notes = raised(self.sites, recipe)
        return Allocation(widths, {"notes": notes} if notes else {}, rank=rank)

    def output_rank(self, share: float) -> int | None:
        """The rank that the output head keeps; None if it stays dense, or would be no cheaper."""
        return output_rank(self.sites.output, share, self.recipe)

    def spared(self, what: str, rank: int | None) -> int:
        """What an output head of this rank saves."""
        counted = what != "params" and rank is not None
        return saved_by(self.sites.output, rank, what, self.positions() if counted else 0)

    @once
    def positions(self) -> int:
        """For how many tokens of one sample the output head is computed."""
        assert self.sites.output is not None
        return count_positions(self.model, self.sites.output, self.sample)

    def _in_time(self, recipe: Recipe, wanted: float, way: Way) -> Allocation:
        """Widths from a measured table of times; the result is timed, and made smaller if it is too slow."""
        aim, recipe = wanted, self.clock().without_idle(recipe)
        for left in reversed(range(ROUNDS)):
            found = self._within(self.clock().budget(aim), recipe, way)
            predicted, measured = self.clock().predicted(found.widths), self.clock().time(found.widths)
            if measured.value <= wanted or not left:
                break
            aim -= OVER * (measured.value - wanted)
        record = {**self.clock().record(), "aimed_at": aim, "predicted": predicted, "measured": measured._asdict()}
        why = {"allocation": {**found.why["allocation"], "target": wanted}, "latency": record}
        return found._replace(why=why | _missed(wanted, measured))

    def _within(self, budget: Budget, recipe: Recipe, way: Way) -> Allocation:
        asked = uniform(self.sites, recipe, budget, way.queries if recipe.allocate == UNIFORM else None)
        widths = {site.name: width_of(site, self.sites, asked) for site in self.sites}
        why = {"budget": budget.what, "target": budget.share, "allocate": recipe.allocate, "equal_share": asked.mlp}
        if recipe.allocate == UNIFORM:
            why |= {} if way.queries is None else {"queries": asked.attn}
        else:
            wanted = query_share(asked.mlp) if way.queries is None else way.queries
            power = usual_power(self.curves()) if way.power is None and way.rates is None else way.power
            curves = comparable(self.curves(), power, way.rates)
            most = 1.0 if way.spread is None else way.spread * asked.mlp
            widths, taken = allocate(curves, self.sites, budget, recipe, widths, (wanted, asked.mlp), most)
            why |= {"queries": taken} | ({} if power is None else {"power": power})
            why |= {} if way.rates is None else {"measured": True}
            why |= {} if way.spread is None else {"spread": way.spread}
        return Allocation(widths, {"allocation": {**why, "removed": removed(self.sites, widths)}}, self.paths())


def query_share(equal: float) -> float:
    """How much of Q/K to remove under a budget that equal shares of MLP and Q/K, `equal` each, would meet.

    The first dimensions of a subspace cost little, the last ones much. So Q/K loses more than the others under a mild
    budget and less under a tight one. The formula fits DeiT-Tiny at 0.35 to 0.9 of its operations (docs/budgets.md).
    """
    return min(3 * equal, 0.25 + 0.5 * equal)


def removed(sites: Sites, widths: Mapping[str, int]) -> dict[str, float]:
    """The share that each kind of site loses, all its sites together."""
    found = {}
    for kind in KINDS:
        own = [site for site in sites if site.kind == kind]
        if own:
            found[kind] = 1 - sum(widths[site.name] for site in own) / sum(site.width for site in own)
    return found


def _missed(wanted: float, measured: Time) -> dict[str, list[str]]:
    if measured.value <= wanted:
        return {}
    return {
        "notes": [f"target_latency={wanted:g} was missed: the narrowed model takes {measured.value:.3f} of the time"]
    }
