"""Tokens and widths under one budget: asked for, kept to, saved, and refused where it makes no sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import corp
from corp import CorpError, Recipe
from corp.errors import CorpWarning
from corp.measure.cost import count_macs, count_params
from corp.measure.timing import Ratio
from corp.planning.plan import Plan
from corp.steps.allocation.tokens import count_operations, merged_copy, rising
from corp.steps.allocation.tokens_and_widths import FASTER, fast_schedule, offer_merging
from corp.storage import folder as storage
from corp.surgery.refit.merged import find_merging
from tests.helpers import models
from tests.helpers.models import SMALL
from tests.helpers.seeds import seeded

SCHEDULE = (3, 2, 2, 2, 1, 0)  # of 16 patches


def build() -> torch.nn.Module:
    return timm.create_model("test_vit", num_classes=9, img_size=64).eval()


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(6, 3, 64, 64, generator=seeded(i)) for i in range(count)]


def tiny(blocks: int = 4) -> torch.nn.Module:
    """A model for 64 patches."""
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, "img_size": 32, "depth": blocks}).eval()


def small(count: int) -> list[torch.Tensor]:
    return [torch.randn(6, 3, 32, 32, generator=seeded(i)) for i in range(count)]


pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # little data: that fits are weak is said


@pytest.mark.parametrize(
    "recipe", [Recipe(tokens=SCHEDULE), Recipe(tokens=SCHEDULE, mlp=0.5), Recipe.paper(tokens=SCHEDULE)]
)
def test_a_given_schedule_is_merged_saved_and_loaded(recipe: Recipe, tmp_path: Path) -> None:
    model, data = build(), batches(4)
    result = corp.prune(model, data, recipe)
    assert result.plan.merging.schedule == SCHEDULE
    assert result.report.macs[1] < result.report.macs[0]
    corp.save(result, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(corp.load(tmp_path / "saved")(data[0]), result.model(data[0]))
    written = storage.export(tmp_path / "saved", tmp_path / "plain", to="timm", profile="compat")
    assert "merged tokens are left out" in written.notes[0]
    plain = timm.create_model(f"local-dir:{tmp_path / 'plain'}", pretrained=True).eval()
    one = data[0][:1]
    idle = merged_copy(result.model, replace(result.plan.merging, schedule=(0,) * 6, read=None))
    assert f"{count_macs(idle, one) / count_macs(result.model, one):.2f} times" in written.notes[0]
    with torch.no_grad():
        torch.testing.assert_close(plain(one), idle(one), rtol=1e-4, atol=1e-4)
    assert Plan.from_dict(json.loads(json.dumps(result.plan.to_dict()))) == result.plan
    assert type(model.blocks) is torch.nn.Sequential  # the user's model is as it was


def test_the_budget_is_kept_by_tokens_and_widths_together() -> None:
    model, data = tiny(), small(8)
    result = corp.prune(model, data, Recipe(target_macs=0.6, tokens="auto"))
    assert 0.55 < result.report.macs[1] / result.report.macs[0] <= 0.6
    record = result.plan.why["tokens"]
    assert record["schedule"] == list(result.plan.merging.schedule)
    assert record["cost"] == pytest.approx(result.report.macs[1] / result.report.macs[0], abs=1e-9)
    assert any(result.plan.merging.schedule)
    assert len(record["tried"]) > 2
    assert record["widths"] == min(record["tried"], key=lambda one: one["divergence"])["widths"]
    assert bool(result.plan.sites) == (record["widths"] < 1)


def test_what_computing_only_what_is_read_saves_already_is_not_merged_or_pruned() -> None:
    model, data = tiny(), small(3)
    result = corp.prune(model, data, Recipe(target_macs=0.97, tokens="auto", sequential=False))
    assert not any(result.plan.merging.schedule)
    assert not result.plan.sites
    with torch.no_grad():
        assert torch.allclose(result.model(data[0]), model(data[0]), atol=1e-5)


def test_the_lightest_model_that_still_agrees_is_found() -> None:
    model, data = tiny(), small(6)
    result = corp.prune(model, data, Recipe(min_agreement=0.5, tokens="auto", sequential=False))
    steps = [one for one in result.plan.why["tokens"]["tried"] if "agreement" in one]
    lowest = min(one["target"] for one in steps if one["agreement"] >= 0.5)
    assert result.report.macs[1] / result.report.macs[0] == pytest.approx(lowest, abs=0.05)
    assert all(one["agreement"] < 0.5 for one in steps if one["target"] < lowest)


def timed_by(seconds: Callable[[torch.nn.Module], float]) -> Callable[[torch.nn.Module, torch.nn.Module], Ratio]:
    def timer(dense: torch.nn.Module, other: torch.nn.Module) -> Ratio:
        gain = seconds(dense) / seconds(other)
        return Ratio(gain, gain, gain)

    return timer


def merges(model: torch.nn.Module) -> list[int]:
    return [getattr(block, "r", 0) for block in model.get_submodule("blocks").children()]


def test_a_budget_of_time_merges_more_or_in_fewer_blocks() -> None:
    model, (one, *_) = tiny(), small(1)
    free = find_merging(model, corp.find_sites(model), one)
    operations, shape = count_operations(model, one, free), rising(4)

    def slow_by(cost: float) -> Callable[[torch.nn.Module], float]:
        """Operations, and a fixed time for every merge."""

        def seconds(other: torch.nn.Module) -> float:
            merging = replace(free, schedule=tuple(merges(other)), read=None)
            return operations.share(model, merging) + cost * sum(r > 0 for r in merging.schedule)

        return seconds

    plain = fast_schedule(model, free, shape, operations, 0.7, timed_by(slow_by(0.0)))
    assert plain.time <= 0.7 / 0.9 + 0.02
    assert sum(r > 0 for r in plain.merging.schedule) == 3
    fewer = fast_schedule(model, free, shape, operations, 0.7, timed_by(slow_by(0.05)))
    assert [i for i, r in enumerate(fewer.merging.schedule) if r] == [1]
    assert fewer.time * FASTER < slow_by(0.05)(model) + 3 * 0.05
    assert fast_schedule(model, free, shape, operations, 0.7, timed_by(slow_by(1.0))).time > 1  # and is then left out


@pytest.mark.parametrize(("seconds", "merged"), [(0.5, True), (1.5, False)])
def test_tokens_stay_as_they_are_where_merging_is_no_faster(
    seconds: float, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny(), small(3)
    timer = timed_by(lambda other: seconds if any(merges(other)) else count_params(other) / count_params(model))
    for module in ("steps.tokens", "steps.allocation.latency"):
        monkeypatch.setattr(f"corp.{module}.compare_times", lambda _sample, *pair: timer(*pair))
    result = corp.prune(model, data, Recipe(target_latency=0.8, tokens="auto", sequential=False))
    assert any("tokens were not merged" in note for note in result.plan.notes) == (not merged)
    assert (result.plan.merging is not None) == merged


def test_data_that_goes_through_forward_is_counted_too() -> None:
    model, data = tiny(2), small(3)
    pairs = [(x, "labels") for x in data]
    for more in ({}, {"tokens": "auto"}):
        recipe = Recipe(target_macs=0.7, sequential=False, **more)
        result = corp.prune(model, pairs, recipe, forward=lambda m, pair: m(pair[0]))
        expected = corp.prune(model, data, recipe)
        assert result.report.macs == expected.report.macs
        assert result.report.macs[1] <= 0.7 * result.report.macs[0]


def test_merging_is_offered_where_it_can_be_done() -> None:
    model, data = tiny(), small(2)
    pruned = corp.prune(model, data, Recipe.paper(mlp=0.5)).model
    offer = offer_merging(model, corp.find_sites(model), pruned, 0.7, data)
    assert offer is not None
    assert offer.samples == 6
    assert offer.merged.divergence().value != offer.pruned.divergence().value
    other, data = models.build("post-norm"), models.batches("post-norm")
    assert offer_merging(other, corp.find_sites(other), other, 0.7, data) is None


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CorpError, match="no parameters"):
        Recipe(tokens="auto", target_params=0.5)
    with pytest.raises(CorpError, match="target_macs, target_latency or min_agreement"):
        Recipe(tokens="auto")
    with pytest.raises(CorpError, match="list"):
        Recipe(tokens=[1.5, 2])
    model, data = build(), batches(2)
    with pytest.raises(CorpError, match="no statistics"):
        corp.prune(model, None, Recipe(tokens=[1, 0]), stats=corp.calibrate(model, data))
    with pytest.raises(CorpError, match="schedule has 2 entries"):
        corp.prune(model, data, Recipe(tokens=[1, 0]))


def test_a_merged_model_that_is_not_refitted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.steps.tokens.why_not", lambda *_args: ([], "its blocks are odd"))
    with pytest.warns(CorpWarning, match="the model was not refitted: its blocks are odd"):
        result = corp.prune(build(), batches(4), Recipe(tokens=SCHEDULE, mlp=0.5))
    assert "the model was not refitted: its blocks are odd" in result.plan.notes
