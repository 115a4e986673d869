"""Parameters and operations of a run's models, and the sample that operations are counted on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from corp.calibration.batches import Forward, evaluating, feed, move, placement
from corp.calibration.hooks import uncompiled
from corp.calibration.statistics import Statistics
from corp.errors import ModelError
from corp.measure.cost import count_macs, count_params
from corp.recipe import Recipe
from corp.steps.allocation.budget import Budget, Sample, count_budget, one_sample, uniform
from corp.steps.allocation.output_head import MOST_OUTPUT, count_positions, output_rank, saved_by
from corp.steps.allocation.tokens import first_sample
from corp.steps.run import Dense, Run


def sample_of(model: nn.Module, batch: Any, forward: Forward | None) -> Sample:
    """The first sample of a batch, to count operations on."""
    return Sample(first_sample(batch if forward is not None else move(batch, *placement(model))), forward)


def countable(model: nn.Module, stats: Statistics | None, run: Run) -> Sample | None:
    """The sample to count operations on, for models that do not accept zeros in the shape of a sample.

    That is one sample of the run, or a whole batch if inputs must match each other (image tokens and patches).
    """
    inputs = run.inputs(model) if stats is None else stats.inputs
    made = [] if inputs is None else [one_sample(model, inputs)]
    if (first := run.first()) is not None:
        batch = first if run.forward is not None else move(first, *placement(model))
        made += [sample_of(model, first, run.forward), Sample(batch, run.forward)]
    for sample in made:
        with suppress(Exception), torch.no_grad(), evaluating(model), uncompiled():  # errors of the model's own code
            feed(model, *sample)
            return sample
    return None


def require_reachable(dense: Dense, recipe: Recipe, sample: Sample | None, *, trials: bool) -> Budget | None:
    """Refuse a target that no widths can meet, before the long work; returns the dense model's count for later.

    None if there is no target of that kind, or if the target cannot be judged before calibration. With `trials`, a
    search may make the output head smaller.
    """
    what = next((what for what in ("params", "macs") if getattr(recipe, f"target_{what}") is not None), None)
    if what is None or (what == "macs" and sample is None):
        return None
    counted = count_budget(dense.model, dense.sites, what, None if what == "params" else sample)
    spared = _spared(dense, recipe, what, sample, trials)
    uniform(dense.sites, recipe, replace(counted, share=getattr(recipe, f"target_{what}"), spared=spared))
    return counted


def _spared(dense: Dense, recipe: Recipe, what: str, sample: Sample | None, trials: bool) -> int:
    """The most that a smaller output head can save under this recipe."""
    head = dense.sites.output
    share = recipe.output
    if share is None:
        share = MOST_OUTPUT if trials and recipe.searches else 0.0
    rank = output_rank(head, share, recipe)
    if head is None or rank is None:
        return 0
    positions = count_positions(dense.model, head, sample) if what == "macs" and sample is not None else 0
    return max(0, saved_by(head, rank, what, positions))


def before_after(dense: nn.Module, smaller: nn.Module, sample: Sample | None) -> dict[str, Any]:
    """Parameters, and operations for one sample if there is one."""
    pair = (dense, smaller)
    costs: dict[str, Any] = {"params": tuple(map(count_params, pair)), "macs": None}
    if sample is not None and placement(dense)[0].type != "meta":
        with evaluating(dense), evaluating(smaller), suppress(ModelError):  # inputs that must match each other
            costs["macs"] = tuple(count_macs(model, *sample) for model in pair)
    return costs
