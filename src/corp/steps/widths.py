"""The complete pruning of widths, step by step."""

from __future__ import annotations

import math

from corp.calibration.batches import count_samples, without_cache
from corp.calibration.experts import supplied
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.calibration.statistics import Statistics
from corp.measure.closeness import Reader
from corp.planning.widths import not_as_requested
from corp.recipe import Recipe
from corp.steps.allocation.search import samples_needed
from corp.steps.apply import apply_plan
from corp.steps.calibrate import recorder_for, run_calibration
from corp.steps.count import countable, require_reachable
from corp.steps.estimate import estimate_run
from corp.steps.plan import choose_widths, plan_sites, warn_of_notes
from corp.steps.refit import refit
from corp.steps.result import Result
from corp.steps.run import Dense, Run
from corp.surgery.refit.repair import why_not


def prune_widths(dense: Dense, run: Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Prune widths: calibrate, choose widths, plan, apply, refit."""
    model, batches, forward, watch = dense.model, run.batches, run.forward, run.observer
    if model.training:
        watch.note("the model is in train mode: corp runs it in eval mode; call .eval() on the result before use")
    with without_cache(model):
        blocks, reason = why_not(model, dense.sites, recipe, batches, forward)
        notes = [f"the model was not refitted: {reason}"] if reason else []
        sample = countable(model, stats, run)
        budget = require_reachable(dense, recipe, sample, trials=run.can_try)
        watch.estimate(lambda: estimate_run(dense, run, recipe, stats, blocks))
        held = _held_batches(dense, run, recipe)
        recorder = recorder_for(dense, run, recipe, blocks) if stats is None else None
        if stats is None:
            stats = run_calibration(dense, run, held=held, recorder=recorder)
        else:
            dense.require({"statistics": stats.weights})
            if held is not None and batches is not None:
                held.collect(batches)
        stats = dense.placed(supplied(watch.calibrated(stats), dense.sites), run.device, watch)
        sample = sample or countable(model, stats, run)
        chosen, found = choose_widths(dense, stats, recipe, held, sample, run, budget)
        del held  # its outputs are not needed any more
        notes = [*not_as_requested(dense.sites, chosen), *notes]
        planned = plan_sites(dense, stats, chosen, found, watch).noting(*notes)
        warn_of_notes(planned)
        result = apply_plan(dense, stats, planned, sample, watch)
        return refit(dense, result, run, chosen, blocks, recorder.passages if recorder else None) if blocks else result


def _held_batches(dense: Dense, run: Run, recipe: Recipe) -> HeldBatches | None:
    """Collect held-out batches for trials, with the dense model's outputs if a search will use them."""
    wanted = samples_needed(recipe, run.answers(dense.sites))
    if not wanted:
        return None
    batches = () if run.batches is None else run.batches
    rule, total = HoldOut.of(batches), count_samples(batches)
    expected = min(wanted, math.ceil(total * rule.share)) if total else wanted
    elsewhere = run.settings is not None and run.settings.offload is not None  # trials run on another device
    reads = recipe.searches and not elsewhere
    return HeldBatches(rule, wanted, Reader.of(dense.model, expected) if reads else None)
