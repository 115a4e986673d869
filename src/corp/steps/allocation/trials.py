"""Trial models, made only to be compared with the dense one, and the search steps that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from corp.io.observer import Advance
from corp.measure.closeness import Closeness, Reference
from corp.measure.intervals import Interval
from corp.planning.output import OutputPlan, plan_output
from corp.planning.plan import Plan
from corp.planning.planners import pairs_of_all, sketch_site
from corp.recipe import Recipe
from corp.sites import projection_at
from corp.steps.allocation.allocator import Allocation, Allocator
from corp.surgery.apply import narrowed_shell


@dataclass
class Trials:
    """Models of various widths, compared with the dense one on held-out batches."""

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
    """A trial model of these widths, which shares all tensors it can with the allocator's model."""
    model, sites, stats = allocator.model, allocator.sites, allocator.stats
    paths, nested = found.paths, allocator.nested()
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
    return plan_output(head, rank, projection_at(allocator.model, head.name), moments, allocator.spectrum())


def climb(measure: Callable[[float], float], start: float, step: float, limits: tuple[float, float]) -> float:
    """Where a function with one minimum is smallest, in steps: tries both directions, then continues where it falls."""
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
            break  # it fell in this direction, so it rises in the other
    return min(known, key=lambda share: known[share])


def bisect(reaches: Callable[[float], bool], low: float, high: float, steps: int) -> list[float]:
    """Bisect [low, high] in `steps` steps, going lower while the midpoint `reaches`; returns the points tried.

    If every midpoint reaches, `low` itself is tried last.
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


def described(interval: Interval) -> str:
    ends = "" if interval.low is None else f" ({interval.low:.3f} to {interval.high:.3f})"
    return f"{interval.value:.3f}{ends}"


def ends(interval: Interval) -> dict[str, float | None]:
    return {"low": interval.low, "high": interval.high}
