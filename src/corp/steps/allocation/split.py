"""How a budget is split between layers, between MLPs and heads, and the output head: by trials."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from corp.errors import PlanError
from corp.measure.closeness import Race
from corp.recipe import UNIFORM, Recipe
from corp.steps.allocation.allocator import Allocation, Allocator, Way
from corp.steps.allocation.output_head import MOST_OUTPUT
from corp.steps.allocation.sensitivity import can_measure, measure_sensitivities
from corp.steps.allocation.trials import Trials, climb, described, ends, sketch_model

POWERS = (0.5, 1.0)  # of the stream's energy, by which errors are divided, if sensitivities cannot be measured
WAYS = 2  # ways to weight errors that are tried
QUERY_STEP = 0.125  # between the Q/K shares that are tried
MOST_QUERIES = 0.9
OUTPUT_STEP = 0.125  # between the shares of the output head that are tried
SPREADS = (2.0, 1.5, 1.25)  # times the equal share that one MLP may lose, tried as long as that does not hurt
EVENER = 1.03  # times the smallest divergence, up to which the more even widths are taken
CLOSER = 1.05  # times as far must the usual way of weighting errors be, so that another one is taken


@dataclass
class Split:
    """How a budget is split: the weights of layers' errors, how far MLPs differ, and how much of Q/K is removed.

    The search starts from the rules and moves in the direction that brings the output closer to the dense model's.
    Equal shares are tried too, so the result is never farther from the dense model than they are.
    """

    trials: Trials
    known: dict[tuple[int, ...], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.race = Race(self.trials.reference)

    def run(self) -> Allocation:
        allocator, recipe = self.trials.allocator, self.trials.recipe
        output = least_output(allocator, recipe)
        rule = allocator.allocate(recipe, Way(output=output)).why["allocation"]
        if recipe.allocate == UNIFORM:
            start = rule["equal_share"]
            return self._recorded(self.at(self.best_queries(Way(start, output=output))), {"queries": start})
        usual = Way(rule["queries"], rule["power"], output)
        if can_measure(allocator.sites):
            found = measure_sensitivities(self.trials, rule["equal_share"])
            ways = [usual._replace(rates=found.rates, power=None if found.precise else usual.power), usual]
        else:
            ways = [usual, *(usual._replace(power=power) for power in POWERS if power != usual.power)]
        way = self.best_queries(self.best_output(self.best_spread(self.best_of(ways))))
        equal = allocator.allocate(replace(recipe, allocate=UNIFORM), Way(output=way.output))
        best = min((self.at(way), equal), key=self.measure)
        return self._recorded(best, {"queries": usual.queries, "power": usual.power})

    def _recorded(self, best: Allocation, rule: dict[str, float | None]) -> Allocation:
        record = {"rule": rule, "samples": self.trials.samples, "tried": self.tried}
        return best._replace(why={**best.why, "split": record})

    def at(self, way: Way) -> Allocation:
        return self.trials.allocator.allocate(self.trials.recipe, way)

    def distance(self, way: Way) -> float:
        return self.measure(self.at(way))

    def best_of(self, ways: Sequence[Way]) -> Way:
        """The first of these ways, unless another is clearly closer: a few samples cannot tell close ones apart."""
        best, *others = ways
        least = self.distance(best)
        for way in others:
            if CLOSER * (found := self.distance(way)) < least:
                best, least = way, found
        return best

    def best_spread(self, way: Way) -> Way:
        """How far MLPs may differ: error curves of single sites are too optimistic where a site loses most.

        Held-out batches resemble the sample. If widths that differ less are about as close, they are safer on other
        data.
        """
        least = self.distance(way)
        for narrower in [way._replace(spread=spread) for spread in SPREADS]:
            found = self.distance(narrower)
            if found > EVENER * least:
                break
            way, least = narrower, min(found, least)
        return way

    def best_queries(self, way: Way) -> Way:
        """How much of Q/K to remove, searched in steps from the given share."""
        assert way.queries is not None
        limits = 0.0, MOST_QUERIES
        best = climb(lambda share: self.distance(way._replace(queries=share)), way.queries, QUERY_STEP, limits)
        return way._replace(queries=best)

    def best_output(self, way: Way) -> Way:
        """The share of the output head to remove, if the other sites gain more from the budget that this frees."""
        if not can_shrink_output(self.trials.allocator, self.trials.recipe):
            return way
        least = way.output or 0.0
        limits = least, MOST_OUTPUT
        best = climb(lambda share: self.distance(way._replace(output=share)), least, OUTPUT_STEP, limits)
        return way._replace(output=best)

    def measure(self, found: Allocation) -> float:
        """The divergence from the dense model; widths that were measured before are not measured again."""
        widths = (*found.widths.values(), found.rank or 0)
        if widths not in self.known:
            divergence = self.race.divergence(sketch_model(self.trials.allocator, self.trials.recipe, found))
            self.trials.advance(1)
            why, self.known[widths] = found.why["allocation"], divergence.value
            told = ("queries", "power", "measured", "spread")
            how = {key: why[key] for key in told if key in why} or {"allocate": UNIFORM}
            self.tried.append({**how, "divergence": divergence.value, **ends(divergence)})
            name = f"{how['queries']:.1%} of Q/K" if "queries" in how else "equal shares"
            name += f", power {how['power']:g}" if "power" in how else ""
            name += ", measured sensitivities" if "measured" in how else ""
            name += f", MLPs at most {how['spread']:g} times the equal share" if "spread" in how else ""
            if found.rank is not None:
                self.tried[-1]["output_rank"], name = found.rank, f"{name}, output head of rank {found.rank}"
            self.trials.allocator.observer.note(f"{name}: divergence {described(divergence)}")
        return self.known[widths]


def can_shrink_output(allocator: Allocator, recipe: Recipe) -> bool:
    """Whether a search may make the output head smaller: not if its share is given, or if that would save nothing."""
    if recipe.output is not None or recipe.target_latency is not None or allocator.sites.output is None:
        return False
    budget = "params" if recipe.target_params is not None else "macs"
    return allocator.spared(budget, allocator.output_rank(MOST_OUTPUT)) > 0


def least_output(allocator: Allocator, recipe: Recipe) -> float | None:
    """The smallest share that the output head must lose so that some widths meet the target; None if it may stay."""
    if not can_shrink_output(allocator, recipe):
        return None
    for step in range(round(MOST_OUTPUT / OUTPUT_STEP)):
        share = step * OUTPUT_STEP or None
        with suppress(PlanError):
            allocator.allocate(recipe, Way(output=share))
            return share
    return MOST_OUTPUT
