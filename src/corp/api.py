"""calibrate, plan, apply, repair, and prune, which is those in a row: each verb reads as its steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from corp.adapters.registry import find_sites
from corp.allocation.allocator import Allocation, Allocator
from corp.allocation.budget import one_sample
from corp.allocation.search import samples_needed, search
from corp.allocation.tokens import merged_copy
from corp.calibration import workers
from corp.calibration.batches import (
    Forward,
    count_samples,
    describe,
    enumerate_batches,
    evaluating,
    example,
    feed,
    move,
    placement,
    without_cache,
)
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.calibration.job import Job, Settings
from corp.calibration.statistics import Statistics
from corp.errors import CorpWarning, DataError, PlanError, StatisticsError
from corp.measure.comparison import Comparison, compare
from corp.measure.cost import count_macs, count_params
from corp.numerics.place import Place
from corp.observer import SILENT, Bars, Observer, timed
from corp.planning.merging import Merging
from corp.planning.output import OutputPlan, plan_output, spectrum_of
from corp.planning.overfitting import warn_if_weak
from corp.planning.plan import Plan, SitePlan
from corp.planning.planners import cost_of, fold_site, pairs_of_all, plan_site
from corp.planning.report import TOTALS, Report
from corp.planning.widths import require_prunable
from corp.recipe import Recipe
from corp.refit.merged import repair_merged
from corp.refit.recording import Recorder, record_batches
from corp.refit.repair import Repair, find_blocks, require_whole, why_not
from corp.refit.replay import Block, Passage
from corp.refit.tokens import choose_merging, width_recipe
from corp.sites import OutputHead, Site, Sites, at_site, fingerprint, projection_at, site_devices
from corp.surgery.apply import history, match, narrowed_copy, set_history
from corp.surgery.dispatch import require_present
from corp.surgery.merged import merge_tokens
from corp.surgery.self_check import require_agreement, verify
from corp.tables import Tabular

MERGING_SAMPLES = 64  # held-out samples on which schedules of merged tokens are compared
ROUNDS = 4  # times that widths of a merged model are made smaller if they are over the budget


@dataclass(frozen=True, repr=False)
class Result(Tabular):
    """A smaller model, what was done to get it, and what that is predicted to cost."""

    model: nn.Module
    plan: Plan
    report: Report
    origin: dict[str, Any] = field(default_factory=dict)  # of the calibration: model, data, preprocessing, versions

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Parameters and operations before and after."""
        return f"{type(self.model).__name__}, {len(self.plan.sites)} sites pruned", TOTALS, self.report.totals()

    def compare(self, dense: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> Comparison:
        """Run `dense`, the model that was pruned, and the pruned one over `batches`, and compare outputs and time.

        The batches should be others than those of the calibration.
        """
        return compare(dense, self.model, list(batches), forward)


class _Dense(NamedTuple):
    """The dense model of one call: its sites are found once, and its weights are hashed once."""

    model: nn.Module
    sites: Sites
    weights: str

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe | None = None) -> _Dense:
        require_present(model)
        sites = find_sites(model)
        if recipe is not None:
            require_prunable(sites, recipe)  # before the long work
        return cls(model, sites, fingerprint(model))

    def placed(self, stats: Statistics, device: torch.device | str | None, observer: Observer) -> Statistics:
        """The statistics where the work on each site is to happen: on `device`, or where the site's weights are."""
        homes = site_devices(self.model, self.sites)
        places = {name: Place.on(home if device is None else torch.device(device)) for name, home in homes.items()}
        wanted = {str(home) for home in homes.values()} if device is None else {str(device)}
        if wanted != {"cpu"}:
            observer.note(f"fits run on {', '.join(sorted({str(place) for place in places.values()}))}")
        return stats.at(places)

    def require(self, claims: Mapping[str, str]) -> None:
        for what, weights in claims.items():
            if weights and weights != self.weights:
                raise StatisticsError(
                    f"the {what} belong to other weights than this model's; calibrate this model, or load those weights"
                )


class _Run(NamedTuple):
    """What stays the same through one run: the data, how it is fed and collected, and who watches."""

    batches: Iterable[Any] | None
    forward: Forward | None
    settings: Settings | None
    origin: dict[str, Any] | None
    observer: Observer
    device: torch.device | str | None = None  # of the fits


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    origin: dict[str, Any] | None = None,
    observer: Observer | None = None,
) -> Statistics:
    """Run the dense model over `batches` and return the sums that every later decision needs.

    A batch is a tensor (model(x)), a dict (model(**x)), or a tuple or list of which only the first element
    is used; anything else goes through forward(model, batch). Nothing of the data itself is kept.

    With `out` the sums go to that folder: a killed run continues when called again, and sums larger than memory
    are taken in several passes (`batches` must then be iterable more than once). Under torch.distributed every
    process takes its share of the batches. `settings` says how many tokens, how much memory; `origin` is a
    record of where model and data came from.
    """
    return _calibrate(_Dense.of(model), _Run(batches, forward, settings, origin, observer or SILENT), out=out)


def plan(
    model: nn.Module,
    stats: Statistics,
    recipe: Recipe,
    *,
    device: torch.device | str | None = None,
    observer: Observer | None = None,
) -> Plan:
    """Decide what every site keeps and predict what that costs. Touches neither data nor the model.

    The fits run on `device`, by default where each site's weights are: in float64 if the device has it at speed, else
    in float32 with refinement, and on the CPU if it cannot solve.
    """
    dense = _Dense.of(model, recipe)
    dense.require({"statistics": stats.weights})
    _refuse_refit(recipe)
    stats = dense.placed(stats, device, observer or SILENT)
    found = Allocator(model, dense.sites, stats, recipe, observer or SILENT).allocate(recipe)
    made = _plan(dense, stats, recipe, found, observer or SILENT)
    _warn_of_notes(made)
    return made


def apply(model: nn.Module, stats: Statistics, plan: Plan, *, device: torch.device | str | None = None) -> Result:
    """Shrink a copy of `model` to the plan and fold the compensation in; the model itself is left as it was.

    Folds that the plan does not hold are computed on `device`, as in `plan`.
    """
    dense = _Dense.of(model)
    dense.require({"statistics": stats.weights, "plan": plan.weights})
    _refuse_refit(plan.recipe)
    return _apply(dense, dense.placed(stats, device, SILENT), plan)


def repair(
    model: nn.Module,
    result: Result,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    forward: Forward | None = None,
    device: torch.device | str | None = None,
    observer: Observer | None = None,
) -> Result:
    """Refit the layers of a pruned model in order, so that later ones repair the errors of earlier ones.

    `model` is the dense one. Widths stay as they are; layers that were not pruned are refitted too, unless the
    recipe skips them. Costs in the plan remain those of each site alone, on the dense model's inputs. The model runs
    where it is; its systems are solved on `device`, as in `plan`.
    """
    recipe = replace(result.plan.recipe if recipe is None else recipe, sequential=True)
    dense = _Dense.of(model)
    dense.require({"plan": result.plan.weights})
    blocks = find_blocks(model, dense.sites, recipe, batches, forward)
    run = _Run(batches, forward, None, None, observer or SILENT, device)
    return _repair(dense, result, run, recipe, blocks)


def prune(
    model: nn.Module,
    batches: Iterable[Any] | None,
    recipe: Recipe,
    *,
    stats: Statistics | None = None,
    forward: Forward | None = None,
    settings: Settings | None = None,
    origin: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Calibrate, choose widths, plan, apply and refit: a smaller model that computes almost the same function.

    `batches`, `forward`, `settings` and `origin` are those of `calibrate`. With `stats` of an earlier calibration on
    the same data, `batches` only serve trials and the refit, and may be None. The fits run on `device`, as in `plan`;
    the model runs where it is. `progress` shows bars in a terminal or
    a notebook; an `observer` is told of every stage instead.

    Where the recipe leaves widths to be measured (min_agreement; a target under allocate="gain"), models are tried on
    batches that calibration held out, and the final fit uses all of them.

    >>> import corp
    >>> from corp.data import digits
    >>> model, data = digits.load_model(), digits.load_split()
    >>> result = corp.prune(model, data.calibration_images.split(128), corp.Recipe(mlp=0.5, attn=0.5))
    >>> sum(p.numel() for p in result.model.parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
    True
    >>> result.compare(model, data.test_images.split(128)).agreement.value > 0.95
    True
    """
    watch = observer or (Bars() if progress else SILENT)
    if recipe.min_agreement is not None and batches is None:
        raise DataError("min_agreement is measured on the data, not on its statistics: give batches")
    dense = _Dense.of(model, recipe)
    run = _Run(batches, forward, settings, origin, watch, device)
    return _prune(dense, run, recipe, stats) if recipe.tokens is None else _prune_merged(dense, run, recipe, stats)


def _prune(dense: _Dense, run: _Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Prune widths: calibrate, choose widths, plan, apply, refit."""
    model, batches, forward, watch = dense.model, run.batches, run.forward, run.observer
    if model.training:
        watch.note("the model is in train mode: corp runs it in eval mode; call .eval() on the result before use")
    with without_cache(model):
        blocks, reason = why_not(model, dense.sites, recipe, batches, forward)
        notes = [f"the model was not refitted: {reason}"] if reason else []
        wanted = samples_needed(recipe)
        held = HeldBatches(HoldOut.of(batches or ()), wanted) if wanted else None
        passages: list[Passage] = []
        if stats is None:
            recorder = _recorder(dense, run, recipe, blocks)
            stats = _calibrate(dense, run, held=held, recorder=recorder)
            passages = recorder.passages if recorder else []
        else:
            dense.require({"statistics": stats.weights})
            _collect(held, batches)
        stats = dense.placed(watch.calibrated(stats), run.device, watch)
        chosen, found = _choose_widths(dense, stats, recipe, held, forward, watch)
        planned = _plan(dense, stats, chosen, found, watch).noting(*notes)
        _warn_of_notes(planned)
        result = _apply(dense, stats, planned)
        return _repair(dense, result, run, chosen, blocks, passages) if blocks else result


def _prune_merged(dense: _Dense, run: _Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Merge tokens, prune widths in the merged model, and refit it to the dense one's stream."""
    batches, forward = run.batches, run.forward
    if batches is None or stats is not None or isinstance(batches, Iterator):
        raise DataError("tokens are merged before calibration: give batches as a list or a loader, and no statistics")
    blocks, reason = why_not(dense.model, dense.sites, recipe, batches, forward)
    held = HeldBatches(HoldOut.of(batches), MERGING_SAMPLES)
    _collect(held, batches)
    some = held.batches or [next(batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0))]
    merging, record = choose_merging(dense.model, dense.sites, recipe, some, forward)
    merged = merged_copy(dense.model, replace(merging, read=None))  # the last block whole: widths see all tokens
    known = dense._replace(model=merged)  # merging moves no site and changes no weight
    pruned = _prune_widths(known, run, recipe, merging, record["cost"])
    plan = Plan(recipe, (), dense.weights, count_samples(batches) or 0) if pruned is None else pruned.plan
    smaller, why = merged if pruned is None else pruned.model, {**plan.why, "tokens": record}
    if blocks:
        passages = record_batches(dense.model, dense.sites, batches, blocks, recipe, plan.samples, forward)
        with run.observer.stage("refitting", len(blocks), "blocks") as advance:
            layers = repair_merged(dense.model, smaller, blocks, passages, recipe, advance)
        why["refit"] = {"samples": sum(p.samples for p in passages), "read": {}, "layers": layers}
    merge_tokens(smaller, merging)
    made = replace(plan, recipe=recipe, why=why, merging=merging)
    made = made.noting(f"the model was not refitted: {reason}") if reason else made
    set_history(smaller, (*history(dense.model), made))
    first = describe(move(some[0], *placement(dense.model))) if forward is None else None
    return Result(smaller, made, Report(made, **_before_after(dense.model, smaller, first)), dict(run.origin or {}))


def _prune_widths(merged: _Dense, run: _Run, recipe: Recipe, merging: Merging, cost: float) -> Result | None:
    """Prune the widths of the merged model to what the budget leaves them; None if tokens have paid it all.

    The last block, which in the end computes only what is read, weighs less then than while widths are chosen, so the
    result is counted, and made smaller if it is over the budget.
    """
    asked = width_recipe(recipe, cost)
    if asked is None:
        return None
    stats = _calibrate(merged, run)
    sample = None if stats.inputs is None else one_sample(merged.model, stats.inputs, "target_macs")
    for _ in range(ROUNDS):
        result = _prune(merged, run, asked, stats)
        if recipe.target_macs is None or asked.target_macs is None or sample is None:
            break
        before, after = (count_macs(merged_copy(model, merging), sample) for model in (merged.model, result.model))
        over = after / before * cost / recipe.target_macs
        if over <= 1:
            break
        asked = replace(asked, target_macs=asked.target_macs / over**1.1)
    return result


def _recorder(dense: _Dense, run: _Run, recipe: Recipe, blocks: list[Block]) -> Recorder | None:
    """What records the refit's batches while calibration runs them; None if it cannot: they are run again then."""
    available = count_samples(() if run.batches is None else run.batches)
    elsewhere = run.settings is not None and run.settings.offload is not None
    if not blocks or not available or elsewhere or workers.current().world > 1:
        return None
    return Recorder(dense.model, dense.sites, blocks, recipe, available)


def _calibrate(
    dense: _Dense,
    run: _Run,
    *,
    out: str | Path | None = None,
    held: HeldBatches | None = None,
    recorder: Recorder | None = None,
) -> Statistics:
    output = dense.sites.output
    watched: list[Site | OutputHead] = [*dense.sites, *([output] if output else [])]
    job = Job(
        dense.model,
        watched,
        () if run.batches is None else run.batches,
        run.settings or Settings(),
        dict(run.origin or {}),
        dense.weights,
        run.forward,
        run.observer,
        held,
        workers.current(),
        recorder,
    )
    with evaluating(dense.model):
        return job.run(None if out is None else Path(out))


def _collect(held: HeldBatches | None, batches: Iterable[Any] | None) -> None:
    """Read the held-out batches that a search needs, where calibration did not pass them."""
    if held is not None and batches is not None:
        for index, _, batch in enumerate_batches(batches, held.wants):
            held.offer(index, batch)


def _choose_widths(
    dense: _Dense,
    stats: Statistics,
    recipe: Recipe,
    held: HeldBatches | None,
    forward: Forward | None,
    observer: Observer,
) -> tuple[Recipe, Allocation]:
    """The widths, found on held-out batches where the recipe asks for it; then only what was fitted is used."""
    tried = held.batches if held else []
    allocator = Allocator(dense.model, dense.sites, stats.fitted() if tried else stats, recipe, observer)
    found: tuple[Recipe, Allocation] = workers.current().gather(search(allocator, tried, forward))[0]
    return found


def _plan(dense: _Dense, stats: Statistics, recipe: Recipe, found: Allocation, observer: Observer) -> Plan:
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
    raised = [site for site in planned if site.ridge > recipe.ridge]
    return made.noting(*(f"{s.name}: its covariance is singular, so its ridge is {s.ridge:g}" for s in raised[:1]))


def _plan_output(dense: _Dense, stats: Statistics, rank: int | None) -> OutputPlan | None:
    head = dense.sites.output
    if head is None or rank is None:
        return None
    linear, moments = projection_at(dense.model, head.name), stats.moments_of(head.name).total()
    return plan_output(head, rank, linear, moments, spectrum_of(linear, moments))


def _apply(dense: _Dense, stats: Statistics, plan: Plan) -> Result:
    smaller = narrowed_copy(dense.model, dense.sites, _with_folds(dense, stats, plan), stats)
    require_agreement(verify(dense.model, smaller, dense.sites, stats, plan))
    set_history(smaller, (*history(dense.model), plan))
    return Result(smaller, plan, Report(plan, **_before_after(dense.model, smaller, stats.inputs)), stats.origin)


def _with_folds(dense: _Dense, stats: Statistics, plan: Plan) -> Plan:
    """The plan with the folds that a file does not hold, computed by all workers."""
    match(dense.sites, plan)  # a plan for another model is refused first

    def work(site_plan: SitePlan) -> SitePlan:
        site = dense.sites[site_plan.name]
        with at_site(site), timed("compensate"):
            return replace(site_plan, fold=fold_site(dense.model, site, site_plan, stats, plan.recipe))

    bare = [site_plan for site_plan in plan.sites if site_plan.fold is None]
    made = workers.current().map(work, bare, lambda one: cost_of(dense.sites[one.name], stats.samples))
    folded = {site_plan.name: site_plan for site_plan in made}
    return replace(plan, sites=tuple(folded.get(one.name, one) for one in plan.sites))


def _repair(
    dense: _Dense,
    result: Result,
    run: _Run,
    recipe: Recipe,
    blocks: list[Block],
    passages: list[Passage] | None = None,
) -> Result:
    batches, forward, observer = run.batches or (), run.forward, run.observer
    if not passages:
        with observer.stage("recording for the refit", None, "samples"):
            passages = record_batches(dense.model, dense.sites, batches, blocks, recipe, result.plan.samples, forward)
    place = None if run.device is None else Place.on(torch.device(run.device))
    work = Repair(dense.model, copy.deepcopy(result.model), recipe, place)
    with timed("repair"), observer.stage("refitting", len(blocks), "blocks") as advance:
        end = work.run(blocks, passages, advance)
    first = next(batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0))
    require_whole(work.smaller, blocks[-1], end, lambda: feed(work.smaller, first, forward))
    samples = sum(passage.samples for passage in passages)
    record = {"samples": samples, "read": {block.name: block.read for block in blocks if block.ends}}
    why = {**result.plan.why, "refit": {**record, "layers": work.corrected}}
    made = replace(result.plan, recipe=recipe, why=why)
    set_history(work.smaller, (*history(dense.model), made))
    return replace(result, model=work.smaller, plan=made, report=replace(result.report, plan=made))


def _warn_of_notes(plan: Plan) -> None:
    """Say what was done otherwise than asked, as a warning where the caller's own line is."""
    for note in plan.notes:
        warnings.warn(note, CorpWarning, stacklevel=3)


def _refuse_refit(recipe: Recipe) -> None:
    if recipe.sequential is True:
        raise PlanError("sequential=True needs the data, not its statistics alone: use corp.prune")


def _before_after(dense: nn.Module, smaller: nn.Module, inputs: Any) -> dict[str, Any]:
    """Parameters, and operations for one sample if the shape of the input is known."""
    pair = (dense, smaller)
    costs: dict[str, Any] = {"params": tuple(map(count_params, pair)), "macs": None}
    device, dtype = placement(dense)
    if inputs is not None and device.type != "meta":
        batch = move(example(inputs, device), device, dtype)
        with evaluating(dense), evaluating(smaller):
            costs["macs"] = tuple(count_macs(model, batch) for model in pair)
    return costs
