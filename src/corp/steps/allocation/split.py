"""How a budget is split between layers, between MLPs and heads, and the output head: by trials."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from corp.recipe import UNIFORM
from corp.steps.allocation.allocator import Allocation
from corp.steps.allocation.trials import Trials, climb, described, ends

POWERS = (0.5, 1.0)  # of the stream's energy, by which errors are divided
QUERY_STEP = 0.125  # between the Q/K shares that are tried
MOST_QUERIES = 0.9
OUTPUT_STEP = 0.125  # between the shares of the output head that are tried
MOST_OUTPUT = 0.75
SPREADS = (2.0, 1.5, 1.25)  # times the equal share that one MLP may lose at the most, tried as long as that helps


@dataclass
class Split:
    """How a budget is split: how errors of different layers count, how far MLPs differ, and how much of Q/K goes.

    The search starts from the rules' answers and goes where the output is nearer to the dense model's. Equal shares
    are tried too: the result is never farther from the dense model than they are.
    """

    trials: Trials
    known: dict[tuple[int, ...], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    output: float = 0.0  # share of the output head's rank that is removed
    spread: float | None = None  # times the equal share that one MLP may lose

    def run(self) -> Allocation:
        allocator, recipe = self.trials.allocator, self.trials.recipe
        first = allocator.allocate(recipe)
        why = first.why["allocation"]
        if recipe.allocate == UNIFORM:
            return self.run_uniform(why["equal_share"])
        start, usual = why["queries"], why["power"]
        power = min((usual, *(p for p in POWERS if p != usual)), key=lambda p: self.measure(self.at(start, p)))
        self.spread = self.best_spread(start, power)
        self.output = self.best_output(start, power)
        queries = climb(lambda share: self.measure(self.at(share, power)), start, QUERY_STEP, (0.0, MOST_QUERIES))
        equal = allocator.allocate(replace(recipe, allocate=UNIFORM), output=self.output)
        best = min((self.at(queries, power), equal), key=self.measure)
        record = {"rule": {"queries": start, "power": usual}, "samples": self.trials.samples, "tried": self.tried}
        return best._replace(why={**best.why, "split": record})

    def run_uniform(self, start: float) -> Allocation:
        """One share for all MLPs and one for all heads."""
        at = partial(self.at, power=None)
        queries = climb(lambda share: self.measure(at(share)), start, QUERY_STEP, (0.0, MOST_QUERIES))
        record = {"rule": {"queries": start}, "samples": self.trials.samples, "tried": self.tried}
        return (best := at(queries))._replace(why={**best.why, "split": record})

    def at(self, queries: float, power: float | None) -> Allocation:
        return self.trials.allocator.allocate(self.trials.recipe, queries, power, self.output, self.spread)

    def best_spread(self, queries: float, power: float) -> float | None:
        """How far MLPs may differ: error curves are of one site alone, and promise too much where it loses most."""
        best, least = None, self.measure(self.at(queries, power))
        for spread in SPREADS:
            found = self.measure(self.trials.allocator.allocate(self.trials.recipe, queries, power, 0.0, spread))
            if found > least:
                break
            if found < least:
                best, least = spread, found
        return best

    def best_output(self, queries: float, power: float) -> float:
        """The share of the output head to remove, if removing some of it makes room for what matters more."""
        allocator, recipe = self.trials.allocator, self.trials.recipe
        budget = "params" if recipe.target_params is not None else "macs"
        if recipe.output is not None or recipe.target_latency is not None or allocator.sites.output is None:
            return 0.0
        if allocator.spared(budget, allocator.output_rank(MOST_OUTPUT)) <= 0:
            return 0.0

        def measured(share: float) -> float:
            return self.measure(allocator.allocate(recipe, queries, power, share, self.spread))

        return climb(measured, 0.0, OUTPUT_STEP, (0.0, MOST_OUTPUT))

    def measure(self, found: Allocation) -> float:
        """The divergence from the dense model; widths that were measured before are not measured again."""
        widths = (*found.widths.values(), found.rank or 0)
        if widths not in self.known:
            divergence, why = self.trials.compare(found).divergence(), found.why["allocation"]
            self.known[widths] = divergence.value
            how = {key: why[key] for key in ("queries", "power", "spread") if key in why} or {"allocate": UNIFORM}
            self.tried.append({**how, "divergence": divergence.value, **ends(divergence)})
            name = f"{how['queries']:.1%} of Q/K" if "queries" in how else "equal shares"
            name += f", power {how['power']:g}" if "power" in how else ""
            name += f", MLPs at most {how['spread']:g} times the equal share" if "spread" in how else ""
            if found.rank is not None:
                self.tried[-1]["output_rank"], name = found.rank, f"{name}, output head of rank {found.rank}"
            self.trials.allocator.observer.note(f"{name}: divergence {described(divergence)}")
        return self.known[widths]
