"""Tokens and widths under one budget: which part of it each takes, and the merged model that widths are fitted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from corp.allocation.tokens import choose_schedule, mac_share
from corp.calibration.batches import Forward
from corp.errors import PlanError
from corp.planning.merging import Merging
from corp.recipe import AUTO, Recipe
from corp.refit.merged import find_merging
from corp.sites import Sites

# Budgets of operations, and the share of the merged model's that widths leave: tokens are the more redundant, so they
# pay first (docs/tokens.md has the measurements).
BUDGETS, WIDTHS = (0.3, 0.4, 0.5, 0.6, 0.7), (0.75, 0.85, 0.9, 0.95, 1.0)


def width_share(target: float) -> float:
    """The share of the merged model's operations that its widths leave under a budget; straight between BUDGETS."""
    if target <= BUDGETS[0]:
        return WIDTHS[0]
    for low, high, first, last in zip(BUDGETS, BUDGETS[1:], WIDTHS, WIDTHS[1:], strict=False):
        if target <= high:
            return first + (last - first) * (target - low) / (high - low)
    return 1.0


def choose_merging(
    model: nn.Module, sites: Sites, recipe: Recipe, held: Sequence[Any], forward: Forward | None
) -> tuple[Merging, dict[str, Any]]:
    """The merging that the recipe asks for, and its record: a schedule as given, or chosen within the budget."""
    free = find_merging(model, sites, held[0], forward)
    if recipe.tokens != AUTO:
        assert isinstance(recipe.tokens, tuple)
        if len(recipe.tokens) != len(free.schedule):
            raise PlanError(
                f"tokens: the schedule has {len(recipe.tokens)} entries, the model {len(free.schedule)} blocks"
            )
        given = replace(free, schedule=recipe.tokens)
        return given, {"schedule": list(recipe.tokens), "cost": mac_share(model, held[0], given, forward)(given)}
    assert recipe.target_macs is not None  # the recipe requires it
    chosen = choose_schedule(model, held, free, recipe.target_macs / width_share(recipe.target_macs), forward=forward)
    record = {"schedule": list(chosen.merging.schedule), "cost": chosen.cost, "divergence": chosen.divergence}
    return chosen.merging, {**record, "tried": list(chosen.tried)}


def width_recipe(recipe: Recipe, cost: float) -> Recipe | None:
    """What is asked of the merged model's widths; None if the tokens have paid the whole budget."""
    rest = replace(recipe, tokens=None, sequential=False, sequential_samples=None)
    if recipe.target_macs is None:
        return rest if recipe.has_target or recipe.mlp or recipe.attn or recipe.vo or recipe.overrides else None
    left = recipe.target_macs / cost
    return None if left >= 1 else replace(rest, target_macs=left)
