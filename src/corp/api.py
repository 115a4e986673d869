"""calibrate, plan, apply, repair, and prune, which is those in a row: each verb reads as its steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from corp.adapters.registry import find_sites
from corp.allocation.allocator import Allocation, Allocator
from corp.allocation.budget import Sample, one_sample
from corp.allocation.latency import compare_times
from corp.allocation.search import samples_needed, search, usual_trials
from corp.allocation.tokens import Operations, count_operations, first_sample, merged_copy
from corp.calibration import workers
from corp.calibration.batches import (
    Forward,
    count_samples,
    enumerate_batches,
    evaluating,
    feed,
    first_samples,
    keep_cache_setting,
    move,
    placement,
    uncompiled,
    without_cache,
)
from corp.calibration.experts import starved, supplied
from corp.calibration.holdout import HeldBatches, HoldOut, batch_count
from corp.calibration.job import Job, Settings
from corp.calibration.statistics import Statistics
from corp.errors import CorpWarning, DataError, ModelError, PlanError, StatisticsError
from corp.measure.closeness import Reference
from corp.measure.comparison import Comparison, compare
from corp.measure.cost import count_macs, count_params
from corp.measure.estimate import Estimate, Load, Machine, estimate_stages, measure_machine, summed
from corp.measure.footprint import resident_bytes
from corp.numerics.place import Place
from corp.observer import SILENT, Bars, Clock, Observer, timed
from corp.planning.merging import Merging
from corp.planning.output import OutputPlan, plan_output, spectrum_of
from corp.planning.overfitting import warn_if_weak
from corp.planning.plan import Plan, SitePlan
from corp.planning.planners import cost_of, fold_site, pairs_of_all, plan_site
from corp.planning.report import TOTALS, Report
from corp.planning.widths import require_prunable, rounded_away
from corp.recipe import AUTO, GAIN, Recipe
from corp.refit.merged import find_merging, repair_merged
from corp.refit.recording import Recorder, record_batches, samples_wanted
from corp.refit.repair import Repair, find_blocks, require_whole, why_not
from corp.refit.replay import Block, Passage
from corp.refit.tokens import JUDGED_AT, WIDTHS, Joint, fast_schedule, given_merging, start_schedule, widths_at
from corp.refit.tokens import samples_needed as samples_for_tokens
from corp.sites import AttentionSite, OutputHead, Site, Sites, at_site, fingerprint, projection_at, site_devices
from corp.surgery.apply import history, match, narrowed_copy, set_history
from corp.surgery.dispatch import require_present
from corp.surgery.experts import pack
from corp.surgery.merged import merge_tokens
from corp.surgery.opened import opened
from corp.surgery.self_check import require_agreement, verify
from corp.tables import Tabular

TRIED_OUT = 8  # samples on which sites are tried out
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
    def of(cls, model: nn.Module, recipe: Recipe | None = None, run: _Run | None = None) -> _Dense:
        """What is found in the model, tried out on the first batch of a run if there is one."""
        require_present(model)
        apart = opened(model)
        if apart is not model:
            set_history(apart, history(model))
        some = None if run is None else run.first()
        some = some if run is None or run.forward is not None else first_samples(some, TRIED_OUT)
        sites = find_sites(apart) if run is None else find_sites(apart, some, run.forward)
        if recipe is not None:
            require_prunable(sites, recipe)  # before the long work
        return cls(apart, sites, fingerprint(apart))

    def covered(self, stats: Statistics) -> _Dense:
        """Without sites that the calibration data did not reach."""
        missing = [s for s in self.sites if not {s.name, getattr(s, "plain_name", s.name)} & set(stats.sums)]
        return self._replace(sites=self.sites.refusing(missing, "nothing of the calibration data reached it"))

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

    def first(self) -> Any:
        """The first batch; None if reading it would take it away from the others."""
        if self.batches is None or isinstance(self.batches, Iterator):
            return None
        return _first_batch(self.batches)


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
    run = _Run(batches, forward, settings, origin, observer or SILENT)
    return _calibrate(_Dense.of(model, None, run), run, out=out)


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
    dense = _Dense.of(model).covered(stats)
    require_prunable(dense.sites, recipe)
    dense.require({"statistics": stats.weights})
    _refuse_refit(recipe)
    stats = dense.placed(supplied(stats, dense.sites), device, observer or SILENT)
    found = Allocator(dense.model, dense.sites, stats, recipe, observer or SILENT).allocate(recipe)
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
    return _packed(_apply(dense, dense.placed(supplied(stats, dense.sites), device, SILENT), plan))


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
    blocks = find_blocks(dense.model, dense.sites, recipe, batches, forward)
    result = replace(result, model=opened(result.model))
    run = _Run(batches, forward, None, None, observer or SILENT, device)
    return _packed(_repair(dense, result, run, recipe, blocks))


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
    watch = Clock(observer or (Bars() if progress else SILENT))
    if recipe.min_agreement is not None and batches is None:
        raise DataError("min_agreement is measured on the data, not on its statistics: give batches")
    run = _Run(batches, forward, settings, origin, watch, device)
    dense = _Dense.of(model, recipe, run)
    way = _prune if recipe.tokens is None else _prune_merged
    pruned = _packed(way(dense, run, recipe, stats))
    keep_cache_setting(pruned.model, model)
    result = replace(pruned, report=replace(pruned.report, run=_outcome(watch, model)))
    watch.finished(result.report.gained())
    return result


def estimate(
    model: nn.Module,
    batches: Iterable[Any] | None,
    recipe: Recipe,
    *,
    stats: Statistics | None = None,
    forward: Forward | None = None,
    settings: Settings | None = None,
    origin: dict[str, Any] | None = None,
) -> Estimate:
    """What `prune` with these arguments would do, and about how long and with how much memory, stage by stage."""
    run = _Run(batches, forward, settings, origin, SILENT)
    dense = _Dense.of(model, recipe, run)
    model = dense.model
    with without_cache(model):
        return _estimate(dense, run, recipe, stats, why_not(model, dense.sites, recipe, batches, forward)[0])


def _prune(dense: _Dense, run: _Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Prune widths: calibrate, choose widths, plan, apply, refit."""
    model, batches, forward, watch = dense.model, run.batches, run.forward, run.observer
    if model.training:
        watch.note("the model is in train mode: corp runs it in eval mode; call .eval() on the result before use")
    with without_cache(model):
        blocks, reason = why_not(model, dense.sites, recipe, batches, forward)
        notes = [f"the model was not refitted: {reason}"] if reason else []
        watch.estimate(lambda: _estimate(dense, run, recipe, stats, blocks))
        wanted = samples_needed(recipe)
        held = HeldBatches(HoldOut.of(batches or ()), wanted) if wanted else None
        passages: list[Passage] = []
        if stats is None:
            recorder = _recorder(dense, run, recipe, blocks)
            stats = _calibrate(dense, run, held=held, recorder=recorder)
            passages = recorder.passages if recorder else []
        else:
            dense.require({"statistics": stats.weights})
            if held is not None and batches is not None:
                held.collect(batches)
        stats = dense.placed(supplied(watch.calibrated(stats), dense.sites), run.device, watch)
        counted = _countable(model, stats.inputs, run)
        chosen, found = _choose_widths(dense, stats, recipe, held, counted, run)
        planned = _plan(dense, stats, chosen, found, watch).noting(*notes)
        _warn_of_notes(planned)
        result = _apply(dense, stats, planned, counted, watch)
        return _repair(dense, result, run, chosen, blocks, passages) if blocks else result


def _prune_merged(dense: _Dense, run: _Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Merge tokens, prune widths in the merged model, and refit it to the dense one's stream."""
    batches, forward = run.batches, run.forward
    if batches is None or stats is not None or isinstance(batches, Iterator):
        raise DataError("tokens are merged before calibration: give batches as a list or a loader, and no statistics")
    blocks, reason = why_not(dense.model, dense.sites, recipe, batches, forward)
    run.observer.estimate(lambda: _estimate(dense, run, recipe, None, blocks))
    held = HeldBatches(HoldOut.of(batches), samples_for_tokens(recipe))
    held.collect(batches)
    first = held.batches[0] if held.batches else _first_batch(batches)
    free = find_merging(dense.model, dense.sites, first, forward)
    known = _Tokens(
        free, count_operations(dense.model, first, free, forward), held.batches or [first], bool(held.batches)
    )
    found = (_merge_within if recipe.tokens == AUTO else _merge_given)(dense, run, recipe, known)
    if found is None:
        note = "tokens were not merged: a model that merges them takes longer here than one that does not"
        result = _prune(dense, run, replace(recipe, tokens=None), None)
        return replace(result, plan=result.plan.noting(note))
    smaller, plan, merging, record = found
    why = {**plan.why, "tokens": {**record, "cost": known.operations.share(smaller, merging)}}
    if blocks:
        passages = record_batches(dense.model, dense.sites, batches, blocks, recipe, plan.samples, forward)
        merge_tokens(smaller, replace(merging, read=None))
        with run.observer.stage("refitting", len(blocks), "blocks") as advance:
            layers = repair_merged(dense.model, smaller, blocks, passages, recipe, advance)
        why["refit"] = {"samples": sum(p.samples for p in passages), "read": {}, "layers": layers}
    merge_tokens(smaller, merging)
    made = replace(plan, recipe=recipe, why=why, merging=merging)
    made = made.noting(f"the model was not refitted: {reason}") if reason else made
    set_history(smaller, (*history(dense.model), made))
    costs = _before_after(dense.model, smaller, _sample(dense.model, first, forward))
    return Result(smaller, made, Report(made, **costs), dict(run.origin or {}))


class _Tokens(NamedTuple):
    """Where tokens of a model can be merged, what that saves, and batches that schedules are tried on."""

    free: Merging
    operations: Operations
    held: list[Any]
    apart: bool  # are they left out of the fitted part of the sums?


class _Merged(NamedTuple):
    """A model whose blocks merge tokens, the plan of its widths, the merging to put in, and its record."""

    model: nn.Module
    plan: Plan
    merging: Merging
    record: dict[str, Any]


def _merge_given(dense: _Dense, run: _Run, recipe: Recipe, tokens: _Tokens) -> _Merged:
    """The schedule as given, and widths that meet the rest of the budget or are given too."""
    assert isinstance(recipe.tokens, tuple)
    merging, target = given_merging(tokens.free, recipe.tokens), recipe.target_macs
    merged = _whole(dense, merging)
    share = 1.0 if target is None else target / tokens.operations.share(dense.model, merging)
    widths = recipe.has_target or recipe.mlp or recipe.attn or recipe.vo or recipe.overrides
    pruned = None
    if widths if target is None else share < 1:
        stats = _calibrate(merged, run)
        asked = replace(recipe, tokens=None, sequential=False, sequential_samples=None)
        for _ in range(ROUNDS):
            pruned = _prune(merged, run, asked if target is None else replace(asked, target_macs=share), stats)
            # The last block will compute only what is read, so it weighs less than it did while widths were chosen.
            over = 1.0 if target is None else tokens.operations.share(pruned.model, merging) / target
            if over <= 1:
                break
            share /= over**1.1
    return _merged(merged, run, recipe, pruned, merging, {})


def _merge_within(dense: _Dense, run: _Run, recipe: Recipe, tokens: _Tokens) -> _Merged | None:
    """Tokens and widths as a target asks for; None if merging them is no faster than leaving them."""
    model, (free, operations, held, _) = dense.model, tokens
    if recipe.target_latency is not None:
        return _merge_in_time(dense, run, recipe, tokens)
    target = recipe.target_macs or JUDGED_AT
    start = start_schedule(model, free, target, held, run.forward)
    record: dict[str, Any] = {"schedules": list(start.tried)}
    merged = _whole(dense, start.merging)
    if recipe.target_macs is not None and not any(start.merging.schedule):
        return _merged(merged, run, recipe, None, operations.fit(model, free, start.shape, target), record)
    stats = _calibrate(merged, run)
    sample = None if run.forward is None else _sample(model, held[0], run.forward)
    fitted = stats.fitted() if tokens.apart else stats
    allocator = Allocator(merged.model, dense.sites, fitted, widths_at(recipe, WIDTHS), run.observer, sample)
    joint = Joint(allocator, free, start.shape, operations, Reference(model, held, run.forward))
    if recipe.min_agreement is not None:
        target, widths = joint.lowest_target(recipe.min_agreement)
    else:
        widths = joint.best_widths(target)
    pruned = None if widths >= 1 else _prune(merged, run, widths_at(recipe, widths), stats)
    smaller = merged.model if pruned is None else pruned.model
    merging = joint.fit(smaller, max(target, joint.least(smaller)))
    return _merged(merged, run, recipe, pruned, merging, {**record, "widths": widths, "tried": joint.tried})


def _merge_in_time(dense: _Dense, run: _Run, recipe: Recipe, tokens: _Tokens) -> _Merged | None:
    """Tokens and then widths within a measured time; None if a model that merges tokens is no faster."""
    assert recipe.target_latency is not None
    model, (free, operations, held, _) = dense.model, tokens
    start = start_schedule(model, free, recipe.target_latency, held, run.forward)
    timer = partial(compare_times, _sample(model, held[0], run.forward))
    found = fast_schedule(model, free, start.shape, operations, recipe.target_latency, timer)
    if found.time >= 1:
        return None
    merged, share = _whole(dense, found.merging), recipe.target_latency / found.time
    pruned = None if share >= 1 else _prune(merged, run, widths_at(recipe, share, "target_latency"), None)
    record = {"schedules": list(start.tried), "time": found.time}
    return _merged(merged, run, recipe, pruned, found.merging, record)


def _whole(dense: _Dense, merging: Merging) -> _Dense:
    """The merged model with its last block whole, so that widths see all tokens; sites and weights are the same."""
    return dense._replace(model=merged_copy(dense.model, replace(merging, read=None)))


def _merged(
    merged: _Dense, run: _Run, recipe: Recipe, pruned: Result | None, merging: Merging, record: dict[str, Any]
) -> _Merged:
    record = {"schedule": list(merging.schedule), **record}
    if pruned is not None:
        return _Merged(pruned.model, pruned.plan, merging, record)
    return _Merged(
        merged.model, Plan(recipe, (), merged.weights, count_samples(run.batches or ()) or 0), merging, record
    )


def _first_batch(batches: Iterable[Any]) -> Any:
    return next((batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0)), None)


def _sample(model: nn.Module, batch: Any, forward: Forward | None) -> Sample:
    """The first sample of a batch, to count operations on."""
    return Sample(first_sample(batch if forward is not None else move(batch, *placement(model))), forward)


def _estimate(dense: _Dense, run: _Run, recipe: Recipe, stats: Statistics | None, blocks: list[Block]) -> Estimate:
    """The stages of a run, their time and memory; none if the number of samples is unknown."""
    model, sites, batches = dense.model, dense.sites, run.batches
    name = (run.origin or (stats.origin if stats else {})).get("model", type(model).__name__)
    what = f"pruning {name} ({count_params(model) / 1e6:.3f} M parameters, {placement(model)[0]}) {recipe.goal()}"
    samples = count_samples(batches) if batches is not None else stats and stats.samples
    if not samples or isinstance(batches, Iterator):
        return Estimate(f"{what}, from samples whose number is unknown", ())
    load, machine = _load(dense, run, recipe, samples, stats, blocks)
    stages = estimate_stages(model, sites, recipe, load, machine)
    data = f"on {samples} samples of {max(load.tokens.values())} tokens"
    return Estimate(f"{what} {data}", stages, resident_bytes(placement(model)[0]))


def _load(
    dense: _Dense, run: _Run, recipe: Recipe, samples: int, stats: Statistics | None, blocks: list[Block]
) -> tuple[Load, Machine]:
    """What a run goes through, and how fast the machine is."""
    model, sites, batches = dense.model, dense.sites, run.batches
    machine, tokens = measure_machine(model, sites, run.first(), run.forward)
    settings = run.settings or Settings()
    inputs = {site.name: site.inputs for site in summed(sites) if not isinstance(site, AttentionSite)}
    taken = {name: settings.tokens_of(width, samples) for name, width in inputs.items()}
    counted = {name: min(tokens[name], n or tokens[name]) for name, n in taken.items()}
    rule, single = HoldOut.of(batches or ()), batches is None or (batch_count(batches) or 2) < 2
    fitted = {name: n * samples * (rule.every - 1) // rule.every for name, n in counted.items()}
    return Load(
        samples,
        tokens,
        counted,
        calibrates=stats is None,
        trials=0 if single else usual_trials(recipe, sites, fitted),
        tried=min(samples_needed(recipe), samples // rule.every),
        curves=recipe.has_target and recipe.allocate == GAIN,
        refitted=min(samples, samples_wanted(recipe, blocks)) if blocks else 0,
    ), machine


def _outcome(watch: Clock, model: nn.Module) -> dict[str, Any] | None:
    """How long the stages took, and the memory at the peak, beside what was estimated; None without an estimate."""
    if watch.estimated is None:
        return None
    known = {stage.name: stage.seconds for stage in watch.estimated.stages}
    names = dict.fromkeys([*known, *watch.seconds])
    stages = [{"stage": n, "estimated": known.get(n, 0.0), "seconds": watch.seconds.get(n, 0.0)} for n in names]
    peak = resident_bytes(placement(model)[0], peak=True)
    return {"stages": stages, "memory": {"estimated": watch.estimated.memory, "peak": peak}}


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


def _choose_widths(
    dense: _Dense,
    stats: Statistics,
    recipe: Recipe,
    held: HeldBatches | None,
    sample: Sample | None,
    run: _Run,
) -> tuple[Recipe, Allocation]:
    """The widths, found on held-out batches where the recipe asks for it; then only what was fitted is used."""
    tried = held.batches if held else []
    used = stats.fitted() if tried else stats
    allocator = Allocator(dense.model, dense.sites, used, recipe, run.observer, sample)
    found: tuple[Recipe, Allocation] = workers.current().gather(search(allocator, tried, run.forward))[0]
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
    made = made.noting(*starved(stats, narrower), *rounded_away(dense.sites, recipe))
    return made.noting(*(f"{s.name}: its covariance is singular, so its ridge is {s.ridge:g}" for s in raised[:1]))


def _plan_output(dense: _Dense, stats: Statistics, rank: int | None) -> OutputPlan | None:
    head = dense.sites.output
    if head is None or rank is None:
        return None
    linear, moments = projection_at(dense.model, head.name), stats.moments_of(head.name).total()
    return plan_output(head, rank, linear, moments, spectrum_of(linear, moments))


def _apply(
    dense: _Dense, stats: Statistics, plan: Plan, sample: Sample | None = None, observer: Observer = SILENT
) -> Result:
    with observer.stage("checking", len(plan.sites), "sites") as advance:
        smaller = narrowed_copy(dense.model, dense.sites, _with_folds(dense, stats, plan), stats)
        require_agreement(verify(dense.model, smaller, dense.sites, stats, plan, advance))
    set_history(smaller, (*history(dense.model), plan))
    if sample is None and stats.inputs is not None:
        sample = one_sample(dense.model, stats.inputs)
    return Result(smaller, plan, Report(plan, **_before_after(dense.model, smaller, sample)), stats.origin)


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
        wanted = min(samples_wanted(recipe, blocks), result.plan.samples)
        with observer.stage("recording for the refit", wanted, "samples") as advance:
            data = dense.model, dense.sites, batches, blocks
            passages = record_batches(*data, recipe, result.plan.samples, forward, advance)
    place = None if run.device is None else Place.on(torch.device(run.device))
    work = Repair(dense.model, copy.deepcopy(result.model), recipe, place)
    with timed("repair"), observer.stage("refitting", len(blocks), "blocks") as advance:
        end = work.run(blocks, passages, advance)
    require_whole(work.smaller, blocks[-1], end, lambda: feed(work.smaller, _first_batch(batches), forward))
    samples = sum(passage.samples for passage in passages)
    record = {"samples": samples, "read": {block.name: block.read for block in blocks if block.ends}}
    why = {**result.plan.why, "refit": {**record, "layers": work.corrected}}
    made = replace(result.plan, recipe=recipe, why=why)
    set_history(work.smaller, (*history(dense.model), made))
    return replace(result, model=work.smaller, plan=made, report=replace(result.report, plan=made))


def _packed(result: Result) -> Result:
    """The result with experts packed as its library has them, as far as they are alike."""
    if left := pack(result.model):
        warnings.warn(
            f"{left[0]}: its experts have different widths or new biases, so they cannot be packed and run one by one"
            + (f"; so do {len(left) - 1} more" if len(left) > 1 else ""),
            CorpWarning,
            stacklevel=3,
        )
    return result


def _warn_of_notes(plan: Plan) -> None:
    """Say what was done otherwise than asked, as a warning where the caller's own line is."""
    for note in plan.notes:
        warnings.warn(note, CorpWarning, stacklevel=3)


def _refuse_refit(recipe: Recipe) -> None:
    if recipe.sequential is True:
        raise PlanError("sequential=True needs the data, not its statistics alone: use corp.prune")


def _before_after(dense: nn.Module, smaller: nn.Module, sample: Sample | None) -> dict[str, Any]:
    """Parameters, and operations for one sample if there is one."""
    pair = (dense, smaller)
    costs: dict[str, Any] = {"params": tuple(map(count_params, pair)), "macs": None}
    if sample is not None and placement(dense)[0].type != "meta":
        with evaluating(dense), evaluating(smaller), suppress(ModelError):  # of inputs that have to fit each other
            costs["macs"] = tuple(count_macs(model, *sample) for model in pair)
    return costs


def _countable(model: nn.Module, inputs: Any, run: _Run) -> Sample | None:
    """What operations are counted on if not on zeros in the shape of a sample, which not every model takes.

    That is one sample of the run, or a whole batch where inputs have to fit each other (image tokens and patches).
    """
    made = [] if inputs is None else [one_sample(model, inputs)]
    if (first := run.first()) is not None:
        batch = first if run.forward is not None else move(first, *placement(model))
        made += [_sample(model, first, run.forward), Sample(batch, run.forward)]
    for sample in made:
        with suppress(Exception), torch.no_grad(), evaluating(model), uncompiled():  # of the model's own code
            feed(model, *sample)
            return sample
    return None
