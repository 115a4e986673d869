"""The output head of a language model under a budget: the rank that it keeps, and what that saves."""

from __future__ import annotations

import torch
from torch import nn

from corp.calibration.batches import evaluating, run
from corp.calibration.hooks import input_of, removing
from corp.calibration.threads import here
from corp.recipe import Recipe, kept_width
from corp.sites import OutputHead
from corp.steps.allocation.budget import Sample

MOST_OUTPUT = 0.75  # the largest share of the rank that a search removes


def output_rank(head: OutputHead | None, share: float, recipe: Recipe) -> int | None:
    """The rank that the head keeps if this share is removed; None if it stays dense, or would be no cheaper."""
    if head is None or share == 0:
        return None
    keep = kept_width(head.inputs, share, recipe.multiple("mlp", head.inputs))
    return keep if keep * (head.inputs + head.outputs) < head.inputs * head.outputs else None


def saved_by(head: OutputHead | None, rank: int | None, what: str, positions: int) -> int:
    """The parameters or operations that a head of this rank saves; a tied one saves no parameters."""
    if head is None or rank is None:
        return 0
    thin, dense = rank * (head.inputs + head.outputs), head.inputs * head.outputs
    if what == "params":
        return (0 if head.tied else dense) - thin - head.outputs
    return (dense - thin) * positions


def count_positions(model: nn.Module, head: OutputHead, sample: Sample) -> int:
    """For how many tokens of the sample the output head is computed."""
    seen: list[int] = []
    hook = model.get_submodule(head.name).register_forward_hook(
        here(lambda _m, args, kwargs, _o: seen.append(input_of(args, kwargs).numel())), with_kwargs=True
    )
    with torch.no_grad(), evaluating(model), removing([hook]):
        run(model, *sample)
    return sum(seen) // head.inputs
