"""From statistics to a plan: the width of every site, then what each keeps."""

from __future__ import annotations

from collections.abc import Sequence

from corp.calibration import workers
from corp.calibration.experts import starved
from corp.calibration.holdout import HeldBatches
from corp.calibration.statistics import Statistics
from corp.errors import warn
from corp.io.observer import Observer, timed
from corp.planning.output import OutputPlan, plan_output, spectrum_of
from corp.planning.overfitting import warn_if_weak
from corp.planning.plan import Plan
from corp.planning.planners import cost_of, pairs_of_all, plan_site
from corp.planning.site_plan import SitePlan
from corp.recipe import Recipe
from corp.sites import Site, and_others, at_site, projection_at
from corp.steps.allocation.allocator import Allocation, Allocator
from corp.steps.allocation.budget import Budget, Sample
from corp.steps.allocation.search import search
from corp.steps.run import Dense, Run


def choose_widths(
    dense: Dense,
    stats: Statistics,
    recipe: Recipe,
    held: HeldBatches | None,
    sample: Sample | None,
    run: Run,
    budget: Budget | None = None,
) -> tuple[Recipe, Allocation]:
    """The widths, found on held-out batches if the recipe requires it, with the fitted part of the sums only."""
    used = stats.fitted() if held is not None and held.batches else stats
    allocator = Allocator(dense.model, dense.sites, used, recipe, run.observer, sample, budget=budget)
    found: tuple[Recipe, Allocation] = workers.current().gather(search(allocator, held, run.forward))[0]
    return found


def plan_sites(dense: Dense, stats: Statistics, recipe: Recipe, found: Allocation, observer: Observer) -> Plan:
    narrower = [site for site in dense.sites if found.widths[site.name] < site.width]
    pairs = pairs_of_all(narrower, found.widths, stats, recipe)
    with timed("plan"), observer.stage("planning", len(narrower), "sites") as advance:

        def work(site: Site) -> SitePlan:
            with at_site(site):
                known = found.paths.get(site.name), pairs.get(site.name)
                made = plan_site(dense.model, site, found.widths[site.name], stats, recipe, *known)
            advance(1)
            return made

        planned = workers.current().map(work, narrower, lambda site: cost_of(site, stats.samples))
    warn_if_weak(planned, stats)
    output = _plan_output(dense, stats, found.rank)
    made = Plan(recipe, tuple(planned), stats.weights, stats.samples, found.why, output)
    return made.noting(*starved(stats, narrower), *_raised(planned, recipe.ridge))


def _raised(planned: Sequence[SitePlan], ridge: float) -> list[str]:
    """A note of the sites whose fit needed a larger ridge, if there are any."""
    raised = [site for site in planned if site.ridge > ridge]
    if not raised:
        return []
    largest = max(site.ridge for site in raised)
    reason = f"the statistics are singular at ridge={ridge:g}, so the ridge is up to {largest:g} there"
    return [f"{and_others(raised)}: {reason}"]


def _plan_output(dense: Dense, stats: Statistics, rank: int | None) -> OutputPlan | None:
    head = dense.sites.output
    if head is None or rank is None:
        return None
    linear, moments = projection_at(dense.model, head.name), stats.moments_of(head.name).total()
    return plan_output(head, rank, linear, moments, spectrum_of(linear, moments))


def warn_of_notes(plan: Plan) -> None:
    """Issue the plan's notes as a warning that points to the caller's line."""
    for note in plan.notes:
        warn(note)
