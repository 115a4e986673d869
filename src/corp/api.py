"""calibrate, plan, apply, repair, and prune, which runs them in sequence: each function reads as its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.calibration.batches import Forward, keep_cache_setting, without_cache
from corp.calibration.experts import supplied
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.errors import DataError, PlanError
from corp.io.observer import SILENT, Bars, Clock, Observer
from corp.measure.estimate import Estimate
from corp.planning.plan import Plan
from corp.planning.widths import not_as_requested, require_prunable, require_recipe
from corp.recipe import Recipe
from corp.steps.allocation.allocator import Allocator
from corp.steps.apply import apply_plan, packed
from corp.steps.calibrate import run_calibration
from corp.steps.count import countable, require_reachable
from corp.steps.estimate import estimate_run, outcome
from corp.steps.plan import plan_sites, warn_of_notes
from corp.steps.refit import refit
from corp.steps.result import Result
from corp.steps.run import Dense, Run
from corp.steps.tokens import prune_tokens
from corp.steps.widths import prune_widths
from corp.surgery.opened import opened
from corp.surgery.refit.repair import find_blocks, why_not


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

    A batch is a tensor (model(x)), a dict (model(**x)), or a tuple or list whose first element is used; anything else
    goes through forward(model, batch). The data itself is not stored.

    With `out` the sums are written to that folder: a killed run continues when called again, and sums larger than
    memory are collected in several passes (`batches` must then be iterable more than once). Under torch.distributed
    every process takes its share of the batches. `settings` limits tokens and memory; `origin` records where model and
    data came from.
    """
    run = Run(batches, forward, settings, origin, observer or SILENT)
    return run_calibration(Dense.of(model, None, run), run, out=out)


def plan(
    model: nn.Module,
    stats: Statistics,
    recipe: Recipe,
    *,
    device: torch.device | str | None = None,
    observer: Observer | None = None,
) -> Plan:
    """Choose what every site keeps and predict the cost, from statistics alone; the model is not changed.

    The fits run on `device`, by default where each site's weights are: in float64 if the device is fast at it,
    otherwise in float32 with refinement, and on the CPU if the device cannot solve them.
    """
    dense = Dense.of(model).covered(stats)
    require_prunable(dense.sites, recipe)
    dense.require({"statistics": stats.weights})
    _refuse_refit(recipe)
    stats = dense.placed(supplied(stats, dense.sites), device, observer or SILENT)
    found = Allocator(dense.model, dense.sites, stats, recipe, observer or SILENT).allocate(recipe)
    made = plan_sites(dense, stats, recipe, found, observer or SILENT)
    made = made.noting(*not_as_requested(dense.sites, recipe))
    warn_of_notes(made)
    return made


def apply(model: nn.Module, stats: Statistics, plan: Plan, *, device: torch.device | str | None = None) -> Result:
    """Return a smaller copy of `model` by the plan, with the compensation folded in; `model` is not changed.

    Folds that the plan does not contain are computed on `device`, as in `plan`.
    """
    dense = Dense.of(model)
    dense.require({"statistics": stats.weights, "plan": plan.weights})
    _refuse_refit(plan.recipe)
    return packed(apply_plan(dense, dense.placed(supplied(stats, dense.sites), device, SILENT), plan))


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
    """Refit the layers of a pruned model in order, so that later ones correct the errors of earlier ones.

    `model` is the dense one. Widths do not change; layers that were not pruned are refitted too, unless the recipe
    skips them. Errors in the plan remain those of each site alone, on the dense model's inputs. The model runs on its
    own device; systems are solved on `device`, as in `plan`.
    """
    recipe = replace(result.plan.recipe if recipe is None else recipe, sequential=True)
    dense = Dense.of(model)
    dense.require({"plan": result.plan.weights})
    blocks = find_blocks(dense.model, dense.sites, recipe, batches, forward)
    result = replace(result, model=opened(result.model))
    run = Run(batches, forward, None, None, observer or SILENT, device)
    return packed(refit(dense, result, run, recipe, blocks))


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
    the same data, `batches` are used only for trials and the refit, and may be None. The fits run on `device`, as in
    `plan`; the model runs on its own device. `progress` shows bars in a terminal or a notebook; an `observer` receives
    every stage instead.

    If the recipe leaves widths to be found (min_agreement; a target under allocate="gain"), models are tried on
    batches that are held out of calibration, and the final fit uses all batches.

    >>> import corp
    >>> from corp.data import digits
    >>> model, data = digits.load_model(), digits.load_split()
    >>> result = corp.prune(model, data.calibration_images.split(128), corp.Recipe(mlp=0.5, attn=0.5))
    >>> sum(p.numel() for p in result.model.parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
    True
    >>> result.compare(model, data.test_images.split(128)).agreement.value > 0.95
    True
    """
    require_recipe(recipe)
    watch = Clock(observer or (Bars() if progress else SILENT))
    if recipe.min_agreement is not None and batches is None:
        raise DataError("min_agreement is measured on the data, not on its statistics: give batches")
    run = Run(batches, forward, settings, origin, watch, device)
    with watch.observer.stage("finding what can be pruned", None, ""):
        dense = Dense.of(model, recipe, run)
    watch.found(dense.sites)
    way = prune_widths if recipe.tokens is None else prune_tokens
    pruned = packed(way(dense, run, recipe, stats))
    keep_cache_setting(pruned.model, model)
    result = replace(pruned, report=replace(pruned.report, run=outcome(watch, model)))
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
    """Estimate the time and memory of `prune` with these arguments, stage by stage."""
    run = Run(batches, forward, settings, origin, SILENT)
    dense = Dense.of(model, recipe, run)
    model = dense.model
    with without_cache(model):
        require_reachable(dense, recipe, countable(model, stats, run), trials=run.can_try)
        return estimate_run(dense, run, recipe, stats, why_not(model, dense.sites, recipe, batches, forward)[0])


def _refuse_refit(recipe: Recipe) -> None:
    if recipe.sequential is True:
        raise PlanError("sequential=True needs the data, not its statistics alone: use corp.prune")
