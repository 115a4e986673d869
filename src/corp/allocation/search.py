"""Pruning that measures as it goes: as far as agreement with the dense model allows, and how much of Q/K goes.

Some batches are held out of calibration; models are made from the statistics of the others and compared with the dense
model on those. Nothing is trained, and the data is read once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from corp import api
from corp.adapters.registry import find_sites
from corp.allocation.allocate import Shared, Sharing
from corp.allocation.budget import budget_of, narrowest
from corp.calibration.batches import Forward, size_of
from corp.calibration.holdout import HoldOut
from corp.calibration.job import Progress
from corp.calibration.statistics import Statistics
from corp.errors import CorpWarning, DataError, PlanError
from corp.measure.closeness import Closeness, Reference
from corp.measure.intervals import Interval
from corp.planning.plan import Plan
from corp.planning.sketch import sketch
from corp.recipe import UNIFORM, WORTH, Recipe
from corp.refit.repair import settled

AGREEMENT_SAMPLES = 512  # held out for min_agreement: 95 % is then known to within two points
SHARE_SAMPLES = 128  # to tell Q/K shares apart
STEPS = 6  # models made to find how far agreement allows to go: the target is then known to about 0.01
POWERS = (0.5, 1.0)  # of the stream's energy, by which errors are divided
QUERY_STEP = 0.125  # between the Q/K shares that are tried
MOST_QUERIES = 0.9

Announce = Callable[[str], None]


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe,
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> api.Result:
    """calibrate, plan and apply in a row.

    Where the recipe leaves something to be measured (min_agreement; how a target is shared with Q/K, under
    allocate="worth"), about one batch in eight is held out of calibration for it. `announce` is told what was tried.
    """
    if not isinstance(recipe, Recipe) or not searches(recipe):
        return api.prune(model, batches, recipe, forward=forward, progress=progress)
    sites = find_sites(model)
    api.require_prunable(sites, recipe)
    recipe = settled(model, sites, recipe, batches, forward)
    split = hold_out(batches, recipe)
    stats = api.calibrate(model, split, forward=forward, progress=progress)
    return prune_calibrated(model, split, stats, recipe, forward=forward, announce=announce)


def prune_calibrated(
    model: nn.Module,
    split: HoldOut,
    stats: Statistics,
    recipe: Recipe,
    *,
    forward: Forward | None = None,
    announce: Announce | None = None,
) -> api.Result:
    """The same from statistics of what `split` did not hold out."""
    found, shared = search(model, stats, recipe, split.kept, forward=forward, announce=announce)
    result = api.apply(model, stats, api.plan(model, stats, found.at_once(), shared=shared))
    return api.repair(model, result, split, found, forward=forward) if found.sequential else result


def searches(recipe: Recipe) -> bool:
    """Does this recipe leave something to be measured?"""
    return recipe.min_agreement is not None or (recipe.has_target and recipe.allocate == WORTH)


def hold_out(batches: Iterable[Any], recipe: Recipe) -> HoldOut:
    return HoldOut(batches, SHARE_SAMPLES if recipe.min_agreement is None else AGREEMENT_SAMPLES)


def search(
    model: nn.Module,
    stats: Statistics,
    recipe: Recipe,
    held: Sequence[Any],
    *,
    forward: Forward | None = None,
    announce: Announce | None = None,
) -> tuple[Recipe, Shared]:
    """The recipe with what was found in place of what it left open, and its widths; on batches that were held out.

    Models are tried as they are before sequential fitting, which costs less.
    """
    sharing = Sharing(model, find_sites(model), stats)
    if recipe.min_agreement is not None:
        if not held:
            raise DataError("min_agreement holds some batches out, so it takes at least two; use smaller batches")
        trials = Trials(sharing, recipe, Reference(model, held, forward), sum(map(size_of, held)), announce)
        return _Agreement(trials).run(recipe.min_agreement)
    if not held or not searches(recipe):  # a single batch: the rules decide, as in corp.planning.plan
        return recipe, sharing.share(recipe)
    few = first_samples(held, SHARE_SAMPLES)
    trials = Trials(sharing, recipe, Reference(model, few, forward), sum(map(size_of, few)), announce)
    return recipe, _Split(trials).run()


def first_samples(batches: Sequence[Any], samples: int) -> list[Any]:
    """The first batches that have so many samples together."""
    chosen: list[Any] = []
    for batch in batches:
        if sum(map(size_of, chosen)) >= samples:
            break
        chosen.append(batch)
    return chosen


@dataclass
class Trials:
    """Models of some widths, made to be compared with the dense one on batches that were held out."""

    sharing: Sharing
    recipe: Recipe
    reference: Reference
    samples: int
    announce: Announce | None

    def compare(self, shared: Shared) -> Closeness:
        model, sites, stats = self.sharing.model, self.sharing.sites, self.sharing.stats
        paths = self.sharing.curves.paths if self.sharing.curves else {}
        plans = tuple(
            sketch(model, site, shared.widths[site.name], stats, self.recipe, paths.get(site.name))
            for site in sites
            if shared.widths[site.name] < site.width
        )
        return self.reference.compare(api.compensated_copy(model, stats, Plan(self.recipe, plans)))

    def forget(self) -> None:
        """Fits of models that were tried take memory, and the plan makes its own; elimination paths serve it too."""
        fits = self.sharing.stats.fits
        for name, known in fits.items():
            fits[name] = {key: value for key, value in known.items() if key[0] == "path"}

    def tell(self, line: str) -> None:
        if self.announce:
            self.announce(line)


@dataclass
class _Agreement:
    """Bisection over the budget: agreement falls as it shrinks."""

    trials: Trials
    tried: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, Shared] | None = None  # the lowest target that had enough
    what: str = ""

    @property
    def target(self) -> str:
        """What is searched over: without the shape of the inputs, operations cannot be counted."""
        return "target_params" if self.trials.sharing.stats.inputs is None else "target_macs"

    def run(self, wanted: float) -> tuple[Recipe, Shared]:
        sharing, any_target = self.trials.sharing, self.at(1.0)
        budget = budget_of(sharing.model, sharing.sites, any_target, sharing.stats.inputs)
        assert budget is not None  # it has a target
        least = narrowest(sharing.sites, any_target, budget)
        targets = bisect(lambda target: self.reaches(target, wanted), least, 1.0, STEPS)
        if self.best is None:
            raise PlanError(
                f"min_agreement={wanted:g} is out of reach: {self.target}={max(targets):.3f}, the lightest one tried, "
                f"gives {self.tried[-1]['agreement']:.3f}; lower it, or calibrate on more samples"
            )
        chosen, shared = self.best
        if min(targets) == chosen:
            warnings.warn(
                f"min_agreement={wanted:g} never stopped the search: {self.target}={chosen:.3f}, "
                "the heaviest pruning there is, still has it",
                CorpWarning,
                stacklevel=3,
            )
        record = {"wanted": wanted, "what": self.what, "samples": self.trials.samples, "steps": self.tried}
        why = {**shared.why, "agreement": {**record, "chosen": chosen}}
        return self.at(chosen), Shared(shared.widths, why)

    def at(self, target: float) -> Recipe:
        asked: dict[str, Any] = {"min_agreement": None, self.target: target}
        return replace(self.trials.recipe, **asked)

    def reaches(self, target: float, wanted: float) -> bool:
        shared = self.trials.sharing.share(self.at(target))
        found = self.trials.compare(shared)
        self.trials.forget()
        agreement, self.what = found.agreement(), found.what
        self.tried.append({self.target: target, "agreement": agreement.value, **_ends(agreement)})
        enough = agreement.value >= wanted
        if enough:
            self.best = target, shared
        verdict = "enough" if enough else "too little"
        self.trials.tell(f"{self.target}={target:.3f}: agreement {described(agreement)}, {verdict}")
        return enough


def bisect(reaches: Callable[[float], bool], low: float, high: float, steps: int) -> list[float]:
    """Ask at the middle of [low, high] so many times, going lower where it `reaches`; what was asked, in order.

    Where the middle always reaches, `low` itself is asked last.
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

    From the rules' answers on, towards where the output is nearer to the dense model's. Equal shares are tried too:
    what is taken is never farther from it than they are.
    """

    trials: Trials
    known: dict[tuple[int, ...], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Shared:
        sharing, recipe = self.trials.sharing, self.trials.recipe
        first = sharing.share(recipe)
        why = first.why["sharing"]
        start, usual = why["queries"], why["power"]
        power = min((usual, *(p for p in POWERS if p != usual)), key=lambda p: self.measure(self.at(start, p)))
        queries = climb(lambda share: self.measure(self.at(share, power)), start, QUERY_STEP, (0.0, MOST_QUERIES))
        equal = sharing.share(replace(recipe, allocate=UNIFORM))
        best = min((self.at(queries, power), equal), key=self.measure)
        self.trials.forget()
        record = {"rule": {"queries": start, "power": usual}, "samples": self.trials.samples, "tried": self.tried}
        return Shared(best.widths, {**best.why, "split": record})

    def at(self, queries: float, power: float) -> Shared:
        return self.trials.sharing.share(self.trials.recipe, queries, power)

    def measure(self, shared: Shared) -> float:
        """The divergence from the dense model, of widths that were not measured yet."""
        widths = tuple(shared.widths.values())
        if widths not in self.known:
            found, why = self.trials.compare(shared).divergence(), shared.why["sharing"]
            self.known[widths] = found.value
            how = {key: why[key] for key in ("queries", "power") if key in why} or {"allocate": UNIFORM}
            self.tried.append({**how, "divergence": found.value, **_ends(found)})
            name = f"{how['queries']:.1%} of Q/K, power {how['power']:g}" if "power" in how else "equal shares"
            self.trials.tell(f"{name}: divergence {described(found)}")
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
