"""Budgets of time, with a clock that is known: what is measured is what is allocated, and the result is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import corp
from corp import CorpError, Recipe
from corp.errors import CorpWarning
from corp.measure.cost import count_params
from corp.measure.timing import Ratio
from corp.measure.units import unit_costs
from corp.numerics.allocate import Option, share
from corp.sites import Sites
from corp.steps.allocation.allocator import Allocator
from corp.steps.allocation.budget import Sample
from corp.steps.allocation.latency import compare_times, narrow_copy
from tests.helpers import rotary_models as rotary
from tests.helpers.kinds import by_kind
from tests.helpers.models import batches, build

# Embedding and head, then what all sites of a kind take at full width.
FIXED, FULL = 0.2, {"mlp": 0.5, "attn": 0.2, "vo": 0.1}


def seconds(sites: Sites, full: dict[str, float]) -> float:
    dense = {"mlp": 96, "attn": 8, "vo": 8}
    return FIXED + sum(full[site.kind] / 2 * site.width / dense[site.kind] for site in sites)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Allocator]:
    def make(full: dict[str, float] = FULL, together: float = 0.0) -> Allocator:
        """`together`: what pruned models take on top of it where more than one kind is narrower."""

        model = build("vit")
        dense = corp.find_sites(model)

        def timed(_sample: Sample, _dense: nn.Module, other: nn.Module) -> Ratio:
            sites = corp.find_sites(other)
            changed = {site.kind for site in sites if site.width < dense[site.name].width}
            extra = together if len(changed) > 1 else 0.0
            value = seconds(dense, full) / (seconds(sites, full) + extra)
            return Ratio(value, 0.99 * value, 1.01 * value)

        monkeypatch.setattr("corp.steps.allocation.latency.compare_times", timed)
        return Allocator(model, dense, corp.calibrate(model, batches("vit")), Recipe())

    return make


@pytest.mark.parametrize("allocate", ["uniform", "gain"])
@pytest.mark.parametrize("target", by_kind([0.9, 0.7, 0.5], [0.7]))
def test_the_result_takes_no_longer_than_asked_and_the_table_is_right(
    allocate: str, target: float, clocked: Any
) -> None:
    made = clocked()
    widths, why, *_ = made.allocate(Recipe(allocate=allocate, target_latency=target))
    taken = seconds(corp.find_sites(narrow_copy(made.model, made.sites, widths, Recipe.paper())), FULL)
    assert target - 0.1 < taken <= target
    found = why["latency"]
    assert found["predicted"] == pytest.approx(taken, abs=1e-4)
    assert found["measured"]["value"] == pytest.approx(taken)
    assert (why["allocation"]["budget"], why["allocation"]["target"]) == ("latency", target)
    halves = {kind: {round(row["removed"], 3): row["saved"] for row in rows} for kind, rows in found["table"].items()}
    assert halves["mlp"][0.5] == pytest.approx(0.25)
    assert halves["vo"][0.75] == pytest.approx(0.075)


@pytest.mark.parametrize("allocate", ["uniform", "gain"])
def test_what_saves_no_time_is_left_alone_unless_it_is_told(allocate: str, clocked: Any) -> None:
    made = clocked({"mlp": 0.7, "attn": 0.0, "vo": 0.1})
    recipe = Recipe(allocate=allocate, target_latency=0.7)
    widths = made.allocate(recipe).widths
    assert {widths[site.name] for site in made.sites.attention} == {8}
    told = replace(recipe, overrides={"blocks.0.*": {"attn": 0.5}, "*": {"vo": 0.25}})
    widths = made.allocate(told).widths
    assert [widths[site.name] for site in made.sites.attention] == [4, 8]
    assert {widths[site.name] for site in made.sites.values} == {6}


def test_a_table_that_promised_too_much_is_corrected_by_timing(clocked: Any) -> None:
    made = clocked(together=0.05)
    why = made.allocate(Recipe(target_latency=0.6, round_to=1)).why
    assert why["latency"]["predicted"] < 0.57
    assert why["latency"]["aimed_at"] < 0.6
    assert why["latency"]["measured"]["value"] <= 0.6


def test_a_target_that_is_missed_is_on_record_and_warned_of(clocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.steps.allocation.allocator.ROUNDS", 1)  # one try, which the table promised too much for
    made = clocked(together=0.05)
    found = made.allocate(Recipe(target_latency=0.7))
    measured = found.why["latency"]["measured"]["value"]
    assert measured > 0.7
    assert found.why["notes"] == [f"target_latency=0.7 was missed: the narrowed model takes {measured:.3f} of the time"]
    with pytest.warns(CorpWarning, match=r"target_latency=0\.7 was missed"):
        plan = corp.plan(made.model, made.stats, Recipe(target_latency=0.7))
    assert plan.notes == found.why["notes"]


def test_times_that_cannot_be_had_say_so(clocked: Any) -> None:
    with pytest.raises(
        CorpError, match=r"target_latency=0.1 is out of reach.*still has 0\.\d+ of the dense model.s time"
    ):
        clocked().allocate(Recipe.paper(target_latency=0.1))
    made = clocked()
    made.stats.inputs = None
    with pytest.raises(CorpError, match="need the shape"):
        made.allocate(Recipe.paper(target_latency=0.5))


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_copies_to_time_run_whatever_is_narrow(family: str) -> None:
    model = rotary.build(family)
    sites = corp.find_sites(model)
    widths = {site.name: site.width // 2 for site in sites}
    smaller = narrow_copy(model, sites, widths, Recipe.paper())
    units = unit_costs(model, sites, None)
    saved = sum(units[site.name].params * (site.width - widths[site.name]) for site in sites)
    assert count_params(model) - count_params(smaller) == saved > 0
    assert rotary.logits(smaller, rotary.batches(1)[0]).shape == rotary.logits(model, rotary.batches(1)[0]).shape


def test_the_real_clock_tells_half_a_model_from_a_whole_one() -> None:
    """Eight times the work is seen on any machine."""

    class Work(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times, self.weight = times, nn.Parameter(torch.eye(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = x @ self.weight
            return x

    assert compare_times(Sample(torch.zeros(256, 256)), Work(80), Work(10)).value > 2


def test_costs_that_are_not_linear_are_allocated_by_what_they_are() -> None:
    """Two sites with one error curve: the one whose first half costs nothing gets it, and no more."""
    errors = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    free_half = torch.tensor([0.0, 0.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    plain = torch.arange(5, dtype=torch.float64)
    assert share([Option(errors, free_half), Option(errors, plain)], 3.0) == [2, 3]
    assert share([Option(errors, 1.0), Option(errors, plain)], 8.0) == [4, 4]
