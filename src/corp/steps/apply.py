"""From a plan to a checked smaller model: folds, narrower modules, packed experts."""

from __future__ import annotations

from dataclasses import replace

from corp.calibration import workers
from corp.calibration.statistics import Statistics
from corp.errors import warn
from corp.io.observer import SILENT, Observer, timed
from corp.planning.plan import Plan
from corp.planning.planners import cost_of, fold_site
from corp.planning.report import Report
from corp.planning.site_plan import SitePlan
from corp.sites import at_site
from corp.steps.allocation.budget import Sample, one_sample
from corp.steps.count import before_after
from corp.steps.result import Result
from corp.steps.run import Dense
from corp.surgery.apply import history, match, narrowed_copy, set_history
from corp.surgery.experts import pack
from corp.surgery.self_check import require_agreement, verify


def apply_plan(
    dense: Dense, stats: Statistics, plan: Plan, sample: Sample | None = None, observer: Observer = SILENT
) -> Result:
    with observer.stage("checking", len(plan.sites), "sites") as advance:
        folded = _with_folds(dense, stats, plan)
        smaller = narrowed_copy(dense.model, dense.sites, folded, stats)
        require_agreement(verify(dense.model, smaller, dense.sites, stats, folded, advance))
    set_history(smaller, (*history(dense.model), plan))
    if sample is None and stats.inputs is not None:
        sample = one_sample(dense.model, stats.inputs)
    return Result(smaller, plan, Report(plan, **before_after(dense.model, smaller, sample)), stats.origin)


def _with_folds(dense: Dense, stats: Statistics, plan: Plan) -> Plan:
    """The plan with folds, which are not saved in files, computed by all workers."""
    match(dense.sites, plan)  # a plan for another model is refused first

    def work(site_plan: SitePlan) -> SitePlan:
        site = dense.sites[site_plan.name]
        with at_site(site), timed("compensate"):
            return replace(site_plan, fold=fold_site(dense.model, site, site_plan, stats, plan.recipe))

    bare = [site_plan for site_plan in plan.sites if site_plan.fold is None]
    made = workers.current().map(work, bare, lambda one: cost_of(dense.sites[one.name], stats.samples))
    folded = {site_plan.name: site_plan for site_plan in made}
    return replace(plan, sites=tuple(folded.get(one.name, one) for one in plan.sites))


def packed(result: Result) -> Result:
    """The result with experts packed as in its library, if they have the same shape."""
    if left := pack(result.model):
        warn(
            f"{left[0]}: its experts have different widths or new biases, so they cannot be packed and run one by one"
            + (f"; so do {len(left) - 1} more" if len(left) > 1 else "")
        )
    return result
