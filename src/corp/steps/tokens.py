"""Prune tokens and widths: merge tokens, prune widths of the merged model, refit it to the dense one's stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from corp.calibration.batches import count_samples, feed, first_batch
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.calibration.statistics import Statistics
from corp.errors import DataError, warn
from corp.measure.closeness import Reference
from corp.planning.merging import Merging
from corp.planning.plan import Plan
from corp.planning.report import Report
from corp.recipe import AUTO, Recipe
from corp.steps.allocation.allocator import Allocator
from corp.steps.allocation.latency import compare_times
from corp.steps.allocation.tokens import Operations, count_operations, merged_copy
from corp.steps.allocation.tokens_and_widths import (
    JUDGED_AT,
    WIDTHS,
    Joint,
    fast_schedule,
    given_merging,
    start_schedule,
    widths_at,
)
from corp.steps.allocation.tokens_and_widths import samples_needed as samples_for_tokens
from corp.steps.calibrate import run_calibration
from corp.steps.count import before_after, sample_of
from corp.steps.estimate import estimate_run
from corp.steps.result import Result
from corp.steps.run import Dense, Run, to_try
from corp.steps.widths import prune_widths
from corp.surgery.apply import history, set_history
from corp.surgery.merged import merge_tokens
from corp.surgery.refit.merged import find_merging, repair_merged
from corp.surgery.refit.recording import record_batches
from corp.surgery.refit.repair import require_whole, why_not
from corp.surgery.stand_in import idle_copy

MOST_SAMPLES = 0.5  # of the first batch: those that a merged model must reproduce up to rounding
ROUNDS = 4  # how often widths of a merged model are reduced if they exceed the budget


def prune_tokens(dense: Dense, run: Run, recipe: Recipe, stats: Statistics | None) -> Result:
    """Merge tokens, prune widths in the merged model, and refit it to the dense one's stream."""
    batches, forward = run.batches, run.forward
    if batches is None or stats is not None or isinstance(batches, Iterator):
        raise DataError("tokens are merged before calibration: give batches as a list or a loader, and no statistics")
    blocks, reason = why_not(dense.model, dense.sites, recipe, batches, forward)
    run.observer.estimate(lambda: estimate_run(dense, run, recipe, None, blocks))
    held = HeldBatches(HoldOut.of(batches), samples_for_tokens(recipe))
    held.collect(batches)
    first = held.batches[0] if held.batches else first_batch(batches)
    free = find_merging(dense.model, dense.sites, first if forward else to_try(first), forward)
    known = _Tokens(
        free, count_operations(dense.model, first, free, forward), held.batches or [first], bool(held.batches)
    )
    found = (_merge_within if recipe.tokens == AUTO else _merge_given)(dense, run, recipe, known)
    if found is None:
        note = "tokens were not merged: a model that merges them takes longer here than one that does not"
        result = prune_widths(dense, run, replace(recipe, tokens=None), None)
        warn(note)
        return replace(result, plan=result.plan.noting(note))
    smaller, plan, merging, record = found
    why = {**plan.why, "tokens": {**record, "cost": known.operations.share(smaller, merging)}}
    if blocks:
        idle = idle_copy(dense.model, (block.name for block in blocks))  # the refit runs the blocks itself
        passages = record_batches(idle, dense.sites, batches, blocks, recipe, plan.samples, forward)
        merge_tokens(smaller, replace(merging, read=None))
        with run.observer.stage("refitting", len(blocks), "blocks") as advance:
            layers, end = repair_merged(dense.model, smaller, blocks, passages, recipe, advance)
        # Where tokens are about equally similar, rounding decides which of them merge.
        require_whole(smaller, blocks, end, lambda: feed(smaller, first_batch(batches), forward), MOST_SAMPLES)
        why["refit"] = {"samples": sum(p.samples for p in passages), "read": {}, "layers": layers}
    merge_tokens(smaller, merging)
    made = replace(plan, recipe=recipe, why=why, merging=merging)
    if reason:
        made = made.noting(note := f"the model was not refitted: {reason}")
        warn(note)
    set_history(smaller, (*history(dense.model), made))
    costs = before_after(dense.model, smaller, sample_of(dense.model, first, forward))
    return Result(smaller, made, Report(made, **costs), dict(run.origin or {}))


class _Tokens(NamedTuple):
    """Where tokens of a model can be merged, what that saves, and the batches on which schedules are tried."""

    free: Merging
    operations: Operations
    held: list[Any]
    apart: bool  # whether the batches are left out of the fitted part of the sums


class _Merged(NamedTuple):
    """A model whose blocks merge tokens, the plan of its widths, the merging to apply, and its record."""

    model: nn.Module
    plan: Plan
    merging: Merging
    record: dict[str, Any]


def _merge_given(dense: Dense, run: Run, recipe: Recipe, tokens: _Tokens) -> _Merged:
    """The given schedule, with widths that meet the rest of the budget or are given too."""
    assert isinstance(recipe.tokens, tuple)
    merging, target = given_merging(tokens.free, recipe.tokens), recipe.target_macs
    merged = _whole(dense, merging)
    share = 1.0 if target is None else target / tokens.operations.share(dense.model, merging)
    widths = recipe.has_target or recipe.mlp or recipe.attn or recipe.vo or recipe.overrides
    pruned = None
    if widths if target is None else share < 1:
        stats = run_calibration(merged, run)
        asked = replace(recipe, tokens=None, sequential=False, sequential_samples=None)
        for _ in range(ROUNDS):
            pruned = prune_widths(merged, run, asked if target is None else replace(asked, target_macs=share), stats)
            # The last block will compute only the tokens that are read, so it costs less than while widths were chosen.
            over = 1.0 if target is None else tokens.operations.share(pruned.model, merging) / target
            if over <= 1:
                break
            share /= over**1.1
    return _merged(merged, run, recipe, pruned, merging, {})


def _merge_within(dense: Dense, run: Run, recipe: Recipe, tokens: _Tokens) -> _Merged | None:
    """Tokens and widths that meet a target; None if merging tokens is no faster than not merging them."""
    model, (free, operations, held, _) = dense.model, tokens
    if recipe.target_latency is not None:
        return _merge_in_time(dense, run, recipe, tokens)
    target = recipe.target_macs or JUDGED_AT
    start = start_schedule(model, free, target, held, run.forward)
    record: dict[str, Any] = {"schedules": list(start.tried)}
    merged = _whole(dense, start.merging)
    if recipe.target_macs is not None and not any(start.merging.schedule):
        return _merged(merged, run, recipe, None, operations.fit(model, free, start.shape, target), record)
    stats = run_calibration(merged, run)
    sample = None if run.forward is None else sample_of(model, held[0], run.forward)
    fitted = stats.fitted() if tokens.apart else stats
    allocator = Allocator(merged.model, dense.sites, fitted, widths_at(recipe, WIDTHS), run.observer, sample)
    joint = Joint(allocator, free, start.shape, operations, Reference(model, held, run.forward))
    if recipe.min_agreement is not None:
        target, widths = joint.lowest_target(recipe.min_agreement)
    else:
        widths = joint.best_widths(target)
    pruned = None if widths >= 1 else prune_widths(merged, run, widths_at(recipe, widths), stats)
    smaller = merged.model if pruned is None else pruned.model
    merging = joint.fit(smaller, max(target, joint.least(smaller)))
    return _merged(merged, run, recipe, pruned, merging, {**record, "widths": widths, "tried": joint.tried})


def _merge_in_time(dense: Dense, run: Run, recipe: Recipe, tokens: _Tokens) -> _Merged | None:
    """Tokens and then widths within a measured time; None if a model that merges tokens is no faster."""
    assert recipe.target_latency is not None
    model, (free, operations, held, _) = dense.model, tokens
    start = start_schedule(model, free, recipe.target_latency, held, run.forward)
    timer = partial(compare_times, sample_of(model, held[0], run.forward))
    found = fast_schedule(model, free, start.shape, operations, recipe.target_latency, timer)
    if found.time >= 1:
        return None
    merged, share = _whole(dense, found.merging), recipe.target_latency / found.time
    pruned = None if share >= 1 else prune_widths(merged, run, widths_at(recipe, share, "target_latency"), None)
    record = {"schedules": list(start.tried), "time": found.time}
    return _merged(merged, run, recipe, pruned, found.merging, record)


def _whole(dense: Dense, merging: Merging) -> Dense:
    """The merged model with a complete last block, so that sums are over all tokens; sites and weights are the same."""
    return dense._replace(model=merged_copy(dense.model, replace(merging, read=None)))


def _merged(
    merged: Dense, run: Run, recipe: Recipe, pruned: Result | None, merging: Merging, record: dict[str, Any]
) -> _Merged:
    record = {"schedule": list(merging.schedule), **record}
    if pruned is not None:
        return _Merged(pruned.model, pruned.plan, merging, record)
    return _Merged(
        merged.model, Plan(recipe, (), merged.weights, count_samples(run.batches or ()) or 0), merging, record
    )
