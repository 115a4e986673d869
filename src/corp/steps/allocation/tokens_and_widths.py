"""Tokens and widths under one budget: how it is divided between them, found by trials on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from corp.calibration.batches import Forward, size_of
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.errors import DataError, ModelError, PlanError
from corp.measure.closeness import Closeness, Race, Reference
from corp.planning.merging import Merging
from corp.recipe import Recipe
from corp.sites import Sites
from corp.steps.allocation.agreement import STEPS as AGREEMENT_STEPS
from corp.steps.allocation.allocator import Allocator
from corp.steps.allocation.latency import Timer
from corp.steps.allocation.search import AGREEMENT_SAMPLES
from corp.steps.allocation.tokens import (
    Chosen,
    Operations,
    Shape,
    choose_schedule,
    count_operations,
    few,
    in_every_second,
    merged_copy,
    rising,
    scaled,
)
from corp.steps.allocation.trials import bisect, climb, sketch_model
from corp.steps.run import to_try
from corp.surgery.refit.merged import find_merging

OFFER_SAMPLES = 64  # held-out samples on which merging is compared with the pruned model
SAMPLES = 128  # held-out samples that splits of a budget are compared on
WIDTHS = 0.9  # where the search starts: the share of the merged model's operations that widths leave
STEP, LEAST = 0.05, 0.6  # between the shares that are tried, and the smallest
JUDGED_AT = 0.6  # of the operations, if the target is not known yet
LEAST_TARGET = 0.15
ROUNDS = 3  # how often a schedule is timed, and made to merge more if it is not fast enough
OVER = 1.1  # the next target is lowered by a slow schedule's excess and a little more
FASTER = 1.03  # the speed-up that merging in half as many blocks must bring, to justify its larger error


class Timed(NamedTuple):
    """A merging, and its time relative to the dense model."""

    merging: Merging
    time: float


def samples_needed(recipe: Recipe) -> int:
    """How many held-out samples tokens="auto" needs."""
    return AGREEMENT_SAMPLES if recipe.min_agreement is not None else SAMPLES


def given_merging(free: Merging, schedule: Sequence[int]) -> Merging:
    """The merging with the recipe's schedule."""
    if len(schedule) != len(free.schedule):
        raise PlanError(f"tokens: the schedule has {len(schedule)} entries, the model {len(free.schedule)} blocks")
    return replace(free, schedule=tuple(schedule))


def start_schedule(
    model: nn.Module, free: Merging, target: float, held: Sequence[Any], forward: Forward | None
) -> Chosen:
    """The schedule of a model whose widths provide their usual part of the budget."""
    return choose_schedule(model, held, free, min(1.0, target / WIDTHS), forward)


@dataclass
class Joint:
    """Models of various widths and schedules under one budget, to be compared with the dense one.

    Widths are chosen first; the schedule then provides the rest, so the budget is met exactly. `allocator` belongs to
    a merged model, and its sums are over merged tokens.
    """

    allocator: Allocator
    free: Merging
    shape: Shape
    operations: Operations
    reference: Reference
    tried: list[dict[str, Any]] = field(default_factory=list)

    def best_widths(self, target: float) -> float:
        """The share of the merged model's operations that widths should leave."""

        race = Race(self.reference)

        def moved(widths: float) -> float:
            try:
                divergence = race.divergence(self.made(target, widths)).value
            except PlanError:  # tokens cannot provide the rest
                return math.inf
            self.tried.append({"target": target, "widths": widths, "divergence": divergence})
            return divergence

        found = climb(moved, WIDTHS, STEP, (LEAST, 1.0))
        if not any(math.isfinite(one["divergence"]) for one in self.tried):
            raise PlanError(f"tokens and widths together cannot reach {target:.3f} of the dense model's operations")
        return found

    def lowest_target(self, agreement: float) -> tuple[float, float]:
        """The smallest share of the dense operations with enough agreement, and the share that widths leave there."""
        widths = self.best_widths(JUDGED_AT)
        good: list[float] = []

        def reaches(target: float) -> bool:
            try:
                found = self.reference.compare(self.made(target, widths)).agreement().value
            except PlanError:
                return False
            self.tried.append({"target": target, "widths": widths, "agreement": found})
            good.extend([target] if found >= agreement else [])
            return found >= agreement

        bisect(reaches, LEAST_TARGET, 1.0, AGREEMENT_STEPS)
        if not good:
            raise PlanError(
                f"min_agreement={agreement:g} is out of reach with merged tokens: {self.tried[-1]}; lower it, or "
                "calibrate on more samples"
            )
        return min(good), widths

    def made(self, target: float, widths: float) -> nn.Module:
        """A model of these widths that merges as many tokens as the target still requires."""
        model = self.narrowed(widths)
        return merged_copy(model, self.fit(model, target))

    def narrowed(self, widths: float) -> nn.Module:
        if widths >= 1:
            return self.allocator.model
        asked = widths_at(self.allocator.recipe, widths)
        return sketch_model(self.allocator, asked, self.allocator.allocate(asked))

    def least(self, model: nn.Module) -> float:
        """The share of the dense operations if a model of these widths merges as many tokens as it can."""
        tokens = self.operations.tokens
        return self.operations.share(model, scaled(self.free, self.shape, tokens, tokens))

    def fit(self, model: nn.Module, target: float) -> Merging:
        return self.operations.fit(model, self.free, self.shape, target)


def widths_at(recipe: Recipe, share: float, target: str = "target_macs") -> Recipe:
    """The recipe for the merged model's widths: they leave `share` of its operations or of its time."""
    asked: dict[str, Any] = {"target_macs": None, "target_latency": None, "min_agreement": None, target: share}
    return replace(recipe, tokens=None, sequential=False, sequential_samples=None, **asked)


def fast_schedule(
    model: nn.Module, free: Merging, shape: Shape, operations: Operations, wanted: float, timer: Timer
) -> Timed:
    """The schedule for the tokens' part of a budget of time, found by timing merged models against the dense one.

    Sorting and gathering take time too, so schedules that merge in every second block are also tried.
    """
    aim = part = min(1.0, wanted / WIDTHS)

    def timed(shape: Shape) -> Timed:
        merging = operations.fit(model, free, shape, aim)
        return Timed(merging, 1 / timer(model, merged_copy(model, merging)).value)

    fewer = in_every_second(shape)
    found, other = timed(shape), timed(fewer)
    if other.time * FASTER < found.time:
        shape, found = fewer, other
    for _ in range(ROUNDS - 1):
        if found.time <= part:
            break
        aim -= OVER * (found.time - part)
        try:
            found = timed(shape)
        except PlanError:  # widths must provide the rest
            break
    return found


class Offer(NamedTuple):
    """What merging tokens instead of pruning widths would gain under the same budget, before any fit."""

    merged: Closeness
    pruned: Closeness
    samples: int


def offer_merging(
    model: nn.Module,
    sites: Sites,
    pruned: nn.Module,
    target: float,
    batches: Iterable[Any],
    forward: Forward | None = None,
) -> Offer | None:
    """Compare a merged model of this share of the operations with the pruned one; None if tokens cannot be merged."""
    held = HeldBatches(HoldOut.of(batches), OFFER_SAMPLES)
    held.collect(batches)
    try:
        some = few(held.batches)
        free = find_merging(model, sites, some[0] if forward else to_try(some[0]), forward)
        operations = count_operations(model, some[0], free, forward)
        merging = operations.fit(model, free, rising(len(free.schedule)), target)
        reference = Reference(model, some, forward)
    except (ModelError, PlanError, DataError):
        return None
    merged = reference.compare(merged_copy(model, merging))
    return Offer(merged, reference.compare(pruned), sum(map(size_of, some)))
