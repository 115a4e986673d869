"""Widths that are found by trying: models are made from the fitted statistics and compared on held-out batches.

Nothing is trained, and models are tried as they are before the refit, which costs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from corp.allocation.allocator import Allocation, Allocator
from corp.allocation.budget import narrowest
from corp.calibration.batches import Forward, size_of
from corp.errors import DataError, ModelError, PlanError
from corp.measure.closeness import Closeness, Reference
from corp.measure.intervals import Interval
from corp.observer import Advance
from corp.planning.output import OutputPlan, plan_output
from corp.planning.plan import Plan
from corp.planning.planners import pairs_of_all, sketch_site
from corp.recipe import UNIFORM, Recipe
from corp.sites import Sites, projection_at
from corp.surgery.apply import narrowed_shell

AGREEMENT_SAMPLES = 512  # held out for min_agreement: 95 % is then known to within two points
SPLIT_SAMPLES = 128  # to tell Q/K shares apart
STEPS = 6  # models made to find how far agreement allows to go: the target is then known to about 0.01
POWERS = (0.5, 1.0)  # of the stream's energy, by which errors are divided
QUERY_STEP = 0.125  # between the Q/K shares that are tried
MOST_QUERIES = 0.9
TOKENS_PER_CHANNEL = 32  # fewer than that, and exact elimination is tried against the paper's ranking
STRONGER = 10.0  # times the ridge, tried where tokens are few
RANKINGS = 4  # rankings and ridges that are compared where tokens are few
USUAL = 3  # steps that a search for one share takes
JUDGED_AT = 0.75  # of the parameters, where the target is yet to be found
OUTPUT_STEP = 0.125  # between the shares of the output head that are tried
MOST_OUTPUT = 0.75


def samples_needed(recipe: Recipe) -> int:
    """How many held-out samples a search under this recipe wants; 0 if there is nothing to try."""
    if recipe.min_agreement is not None:
        return AGREEMENT_SAMPLES
    return SPLIT_SAMPLES if recipe.searches or _doubtful(recipe) else 0


def usual_trials(recipe: Recipe, sites: Sites, tokens: Mapping[str, int]) -> int:
    """About how many models a search makes, from the tokens that are fitted at every site."""
    few = any(tokens[site.name] < TOKENS_PER_CHANNEL * site.width for site in sites.mlp if not recipe.skips(site.name))
    judged = RANKINGS if few and _doubtful(recipe) else 0
    if recipe.min_agreement is not None:
        return judged + STEPS
    climbed = USUAL * (2 if sites.output and recipe.output is None else 1)
    return judged + (len(POWERS) + climbed + 1 if recipe.searches else 0)


def most_trials(recipe: Recipe) -> int:
    """How many models a search makes at the most."""
    if recipe.min_agreement is not None:
        return STEPS + 1
    steps = MOST_QUERIES / QUERY_STEP + MOST_OUTPUT / OUTPUT_STEP
    return RANKINGS + len(POWERS) + math.ceil(steps) + 1 + 1  # rankings, one step the wrong way, and equal shares


def search(allocator: Allocator, held: Sequence[Any], forward: Forward | None = None) -> tuple[Recipe, Allocation]:
    """The allocator's recipe with what was left open found, and the widths, by trials on held-out batches."""
    recipe, observer = allocator.recipe, allocator.observer
    if recipe.min_agreement is not None and not held:
        raise DataError("min_agreement holds some batches out, so it takes at least two; use smaller batches")
    scarce = bool(held) and _doubtful(recipe) and _scarce(allocator)
    if not held or not (recipe.searches or scarce):  # a single batch: the rules decide, as in corp.plan
        return recipe, allocator.allocate(recipe)
    with observer.stage("trying widths", most_trials(recipe), "models") as advance:
        try:
            reference = Reference(allocator.model, held, forward)
        except ModelError as error:
            if recipe.searches:
                raise
            return recipe, allocator.allocate(recipe)._replace(why={"notes": [f"the ranking was not judged: {error}"]})
        trials = Trials(allocator, recipe, reference, sum(map(size_of, held)), advance)
        note: dict[str, list[str]] = {}
        if scarce:
            trials, note = _judged(trials)
            recipe = trials.recipe
        if recipe.min_agreement is not None:
            recipe, found = _Agreement(trials).run(recipe.min_agreement)
        else:
            found = _Split(trials).run() if recipe.searches else trials.allocator.allocate(recipe)
    return recipe, found._replace(why={**found.why, **note})


def _doubtful(recipe: Recipe) -> bool:
    """Whether the choice of MLP channels needs more data than a ranking does."""
    return recipe.rank == "exact" and recipe.compensate == "full"


def _scarce(allocator: Allocator) -> bool:
    """Whether some MLP that is pruned saw too few tokens per channel for exact elimination to be trusted."""
    stats = allocator.stats
    pruned = [site for site in allocator.sites.mlp if not allocator.recipe.skips(site.name)]
    return any(stats.moments_of(site.name).fit.n < TOKENS_PER_CHANNEL * site.width for site in pruned)


def _judged(trials: Trials) -> tuple[Trials, dict[str, list[str]]]:
    """Trials under the ranking and ridge whose model is nearest to the dense one on held-out batches.

    Exact elimination follows the sample where there are few tokens per channel; the paper's ranking does so less.
    """
    first, asked = trials.allocator, trials.recipe
    rule = replace(asked, min_agreement=None, target_params=JUDGED_AT) if asked.min_agreement is not None else asked
    found = first.allocate(rule)
    known: dict[tuple[str, float], float] = {}
    stronger = Allocator(
        first.model, first.sites, first.stats, replace(asked, ridge=STRONGER * asked.ridge), first.observer, first.given
    )
    for rank, ridge in product((asked.rank, "combined"), (asked.ridge, STRONGER * asked.ridge)):
        if found.paths and (rank, ridge) == (asked.rank, stronger.recipe.ridge):
            found = found._replace(paths={name: curve.path for name, curve in stronger.curves.items() if curve.path})
        tried = replace(trials, recipe=replace(asked, rank=rank, ridge=ridge)).compare(found)
        known[rank, ridge] = tried.divergence().value
        first.observer.note(f"rank {rank}, ridge {ridge:g}: divergence {known[rank, ridge]:.3f}")
    rank, ridge = min(known, key=lambda key: known[key])
    if (rank, ridge) == (asked.rank, asked.ridge):
        return trials, {}
    note = (
        f"there are few tokens per MLP channel: rank={rank!r} with ridge={ridge:g} is nearer to the dense model on "
        f"held-out batches than rank={asked.rank!r} with ridge={asked.ridge:g}, and was used; calibrate on more data"
    )
    recipe = replace(asked, rank=rank, ridge=ridge)
    allocator = first if ridge == asked.ridge else stronger  # error curves depend on the ridge, not on the ranking
    return replace(trials, allocator=allocator, recipe=recipe), {"notes": [note]}


@dataclass
class Trials:
    """Models of some widths, made to be compared with the dense one on held-out batches."""

    allocator: Allocator
    recipe: Recipe
    reference: Reference
    samples: int
    advance: Advance

    def compare(self, found: Allocation) -> Closeness:
        closeness = self.reference.compare(sketch_model(self.allocator, self.recipe, found))
        self.advance(1)
        return closeness


def sketch_model(allocator: Allocator, recipe: Recipe, found: Allocation) -> nn.Module:
    """A model of these widths that shares all tensors it can with the allocator's: for trials."""
    model, sites, stats = allocator.model, allocator.sites, allocator.stats
    paths, nested = found.paths, allocator.nested
    pairs = pairs_of_all(sites, found.widths, stats, recipe)
    plans = tuple(
        sketch_site(model, site, keep, stats, recipe, paths.get(site.name), nested.get(site.name), pairs.get(site.name))
        for site in sites
        if (keep := found.widths[site.name]) < site.width
    )
    return narrowed_shell(model, sites, Plan(recipe, plans, output=sketch_output(allocator, found.rank)), stats)


def sketch_output(allocator: Allocator, rank: int | None) -> OutputPlan | None:
    """The output head of this rank, if it is factored."""
    head = allocator.sites.output
    if head is None or rank is None:
        return None
    moments = allocator.stats.moments_of(head.name).total()
    return plan_output(head, rank, projection_at(allocator.model, head.name), moments, allocator.spectrum)


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
        return "macs" if self.trials.allocator.counts_macs else "params"

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
        return replace(self.trials.recipe, **asked)

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
    output: float = 0.0  # share of the output head's rank that is removed

    def run(self) -> Allocation:
        allocator, recipe = self.trials.allocator, self.trials.recipe
        first = allocator.allocate(recipe)
        why = first.why["allocation"]
        if recipe.allocate == UNIFORM:
            return self.run_uniform(why["equal_share"])
        start, usual = why["queries"], why["power"]
        power = min((usual, *(p for p in POWERS if p != usual)), key=lambda p: self.measure(self.at(start, p)))
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
        return self.trials.allocator.allocate(self.trials.recipe, queries, power, self.output)

    def best_output(self, queries: float, power: float) -> float:
        """The share of the output head to remove, if removing some of it makes room for what matters more."""
        allocator, recipe = self.trials.allocator, self.trials.recipe
        budget = "params" if recipe.target_params is not None else "macs"
        if recipe.output is not None or recipe.target_latency is not None or allocator.sites.output is None:
            return 0.0
        if allocator.spared(budget, allocator.output_rank(MOST_OUTPUT)) <= 0:
            return 0.0

        def measured(share: float) -> float:
            return self.measure(allocator.allocate(recipe, queries, power, share))

        return climb(measured, 0.0, OUTPUT_STEP, (0.0, MOST_OUTPUT))

    def measure(self, found: Allocation) -> float:
        """The divergence from the dense model; widths that were measured before are not measured again."""
        widths = (*found.widths.values(), found.rank or 0)
        if widths not in self.known:
            divergence, why = self.trials.compare(found).divergence(), found.why["allocation"]
            self.known[widths] = divergence.value
            how = {key: why[key] for key in ("queries", "power") if key in why} or {"allocate": UNIFORM}
            self.tried.append({**how, "divergence": divergence.value, **_ends(divergence)})
            name = f"{how['queries']:.1%} of Q/K" if "queries" in how else "equal shares"
            name += f", power {how['power']:g}" if "power" in how else ""
            if found.rank is not None:
                self.tried[-1]["output_rank"], name = found.rank, f"{name}, output head of rank {found.rank}"
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
