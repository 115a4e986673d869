"""Widths that are found by trying: models are made from the fitted statistics and compared on held-out batches.

Nothing is trained, and models are tried as they are before the refit, which costs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from corp.allocation.allocator import Allocation, Allocator
from corp.allocation.budget import narrowest
from corp.calibration.batches import Forward, size_of
from corp.errors import DataError, PlanError
from corp.measure.closeness import Closeness, Reference
from corp.measure.intervals import Interval
from corp.observer import Advance
from corp.planning.plan import Plan
from corp.planning.planners import sketch_site
from corp.recipe import UNIFORM, Recipe
from corp.surgery.apply import narrowed_shell

AGREEMENT_SAMPLES = 512  # held out for min_agreement: 95 % is then known to within two points
SPLIT_SAMPLES = 128  # to tell Q/K shares apart
STEPS = 6  # models made to find how far agreement allows to go: the target is then known to about 0.01
POWERS = (0.5, 1.0)  # of the stream's energy, by which errors are divided
QUERY_STEP = 0.125  # between the Q/K shares that are tried
MOST_QUERIES = 0.9


def samples_needed(recipe: Recipe) -> int:
    """How many held-out samples a search under this recipe wants."""
    return SPLIT_SAMPLES if recipe.min_agreement is None else AGREEMENT_SAMPLES


def most_trials(recipe: Recipe) -> int:
    """How many models a search makes at the most."""
    if recipe.min_agreement is not None:
        return STEPS + 1
    return len(POWERS) + math.ceil(MOST_QUERIES / QUERY_STEP) + 1 + 1  # one step the wrong way, and equal shares


def search(allocator: Allocator, held: Sequence[Any], forward: Forward | None = None) -> tuple[Recipe, Allocation]:
    """The allocator's recipe with its target found, and the widths, by trials on held-out batches."""
    recipe, observer = allocator.recipe, allocator.observer
    if recipe.min_agreement is not None and not held:
        raise DataError("min_agreement holds some batches out, so it takes at least two; use smaller batches")
    if not held or not recipe.searches:  # a single batch: the rules decide, as in corp.plan
        return recipe, allocator.allocate(recipe)
    with observer.stage("trying widths", most_trials(recipe), "models") as advance:
        trials = Trials(allocator, Reference(allocator.model, held, forward), sum(map(size_of, held)), advance)
        if recipe.min_agreement is not None:
            return _Agreement(trials).run(recipe.min_agreement)
        return recipe, _Split(trials).run()


@dataclass
class Trials:
    """Models of some widths, made to be compared with the dense one on held-out batches."""

    allocator: Allocator
    reference: Reference
    samples: int
    advance: Advance

    def compare(self, found: Allocation) -> Closeness:
        model, sites, stats = self.allocator.model, self.allocator.sites, self.allocator.stats
        recipe = self.allocator.recipe
        plans = tuple(
            sketch_site(model, site, found.widths[site.name], stats, recipe, found.paths.get(site.name))
            for site in sites
            if found.widths[site.name] < site.width
        )
        closeness = self.reference.compare(narrowed_shell(model, sites, Plan(recipe, plans), stats))
        self.advance(1)
        return closeness


@dataclass
class _Agreement:
    """Bisection over the budget: agreement falls as it shrinks."""

    trials: Trials
    tried: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, Allocation] | None = None  # the lowest target that had enough
    what: str = ""

    @property
    def kind(self) -> str:
        """What is searched over: without the shape of the inputs, operations cannot be counted."""
        return "params" if self.trials.allocator.stats.inputs is None else "macs"

    def run(self, wanted: float) -> tuple[Recipe, Allocation]:
        allocator = self.trials.allocator
        least = narrowest(allocator.sites, self.at(1.0), allocator.budget(self.kind, 1.0))
        targets = bisect(lambda target: self.reaches(target, wanted), least, 1.0, STEPS)
        if self.best is None:
            raise PlanError(
                f"min_agreement={wanted:g} is out of reach: target_{self.kind}={max(targets):.3f}, the lightest one "
                f"tried, gives {self.tried[-1]['agreement']:.3f}; lower it, or calibrate on more samples"
            )
        chosen, found = self.best
        record = {"wanted": wanted, "what": self.what, "samples": self.trials.samples, "steps": self.tried}
        why = {**found.why, "agreement": {**record, "chosen": chosen}}
        if min(targets) == chosen:
            why["notes"] = [
                f"min_agreement={wanted:g} never stopped the search: target_{self.kind}={chosen:.3f}, "
                "the heaviest pruning there is, still has it"
            ]
        return self.at(chosen), found._replace(why=why)

    def at(self, target: float) -> Recipe:
        asked: dict[str, Any] = {"min_agreement": None, f"target_{self.kind}": target}
        return replace(self.trials.allocator.recipe, **asked)

    def reaches(self, target: float, wanted: float) -> bool:
        found = self.trials.allocator.allocate(self.at(target))
        closeness = self.trials.compare(found)
        agreement, self.what = closeness.agreement(), closeness.what
        self.tried.append({f"target_{self.kind}": target, "agreement": agreement.value, **_ends(agreement)})
        enough = agreement.value >= wanted
        if enough:
            self.best = target, found
        verdict = "enough" if enough else "too little"
        self.trials.allocator.observer.note(
            f"target_{self.kind}={target:.3f}: agreement {described(agreement)}, {verdict}"
        )
        return enough


def bisect(reaches: Callable[[float], bool], low: float, high: float, steps: int) -> list[float]:
    """Ask at the middle of [low, high] `steps` times, going lower where it `reaches`; returns what was asked.

    If the middle always reaches, `low` itself is asked last.
    """
    asked: list[float] = []
    bottom = low
    for _ in range(steps):
        asked.append((low + high) / 2)
        low, high = (low, asked[-1]) if reaches(asked[-1]) else (asked[-1], high)
    if low == bottom:
        asked.append(low)
        reaches(low)
    return asked


@dataclass
class _Split:
    """How a budget is split: how errors of different layers count, and how much of Q/K goes; by measuring both.

    The search starts from the rules' answers and goes where the output is nearer to the dense model's. Equal shares
    are tried too: the result is never farther from the dense model than they are.
    """

    trials: Trials
    known: dict[tuple[int, ...], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Allocation:
        allocator, recipe = self.trials.allocator, self.trials.allocator.recipe
        first = allocator.allocate(recipe)
        why = first.why["allocation"]
        start, usual = why["queries"], why["power"]
        power = min((usual, *(p for p in POWERS if p != usual)), key=lambda p: self.measure(self.at(start, p)))
        queries = climb(lambda share: self.measure(self.at(share, power)), start, QUERY_STEP, (0.0, MOST_QUERIES))
        equal = allocator.allocate(replace(recipe, allocate=UNIFORM))
        best = min((self.at(queries, power), equal), key=self.measure)
        record = {"rule": {"queries": start, "power": usual}, "samples": self.trials.samples, "tried": self.tried}
        return best._replace(why={**best.why, "split": record})

    def at(self, queries: float, power: float) -> Allocation:
        return self.trials.allocator.allocate(self.trials.allocator.recipe, queries, power)

    def measure(self, found: Allocation) -> float:
        """The divergence from the dense model; widths that were measured before are not measured again."""
        widths = tuple(found.widths.values())
        if widths not in self.known:
            divergence, why = self.trials.compare(found).divergence(), found.why["allocation"]
            self.known[widths] = divergence.value
            how = {key: why[key] for key in ("queries", "power") if key in why} or {"allocate": UNIFORM}
            self.tried.append({**how, "divergence": divergence.value, **_ends(divergence)})
            name = f"{how['queries']:.1%} of Q/K, power {how['power']:g}" if "power" in how else "equal shares"
            self.trials.allocator.observer.note(f"{name}: divergence {described(divergence)}")
        return self.known[widths]


def climb(measure: Callable[[float], float], start: float, step: float, limits: tuple[float, float]) -> float:
    """The least of a function with one valley, in steps: both ways from the start, then on where it falls."""
    known = {start: measure(start)}
    for direction in (-step, step):
        best = start
        while True:
            here = min(max(best + direction, limits[0]), limits[1])
            if here in known:
                break
            known[here] = measure(here)
            if known[here] >= known[best]:
                break
            best = here
        if best != start:
            break  # it fell this way, so it rises the other
    return min(known, key=lambda share: known[share])


def described(interval: Interval) -> str:
    ends = "" if interval.low is None else f" ({interval.low:.3f} to {interval.high:.3f})"
    return f"{interval.value:.3f}{ends}"


def _ends(interval: Interval) -> dict[str, float | None]:
    return {"low": interval.low, "high": interval.high}
