"""Tokens and widths under one budget: asked for, kept to, saved, and refused where it makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch

import corp
from corp import CorpError, Recipe
from corp.planning.plan import Plan
from corp.refit.tokens import BUDGETS, WIDTHS, width_share
from tests.helpers.seeds import seeded

SCHEDULE = (4, 6, 6, 6, 4, 0)


def build() -> torch.nn.Module:
    return timm.create_model("test_vit", num_classes=9).eval()


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(6, 3, 160, 160, generator=seeded(i)) for i in range(count)]


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
    assert Plan.from_dict(json.loads(json.dumps(result.plan.to_dict()))) == result.plan
    assert type(model.blocks) is torch.nn.Sequential  # the user's model is as it was


def test_the_budget_is_kept_by_tokens_and_widths_together() -> None:
    model, data = build(), batches(8)
    result = corp.prune(model, data, Recipe(target_macs=0.6, tokens="auto"))
    assert result.report.macs[1] <= 0.6 * result.report.macs[0]
    assert result.plan.why["tokens"]["schedule"] == list(result.plan.merging.schedule)
    assert any(result.plan.merging.schedule)


def test_tokens_pay_first_and_widths_more_and_more() -> None:
    assert [width_share(target) for target in BUDGETS] == pytest.approx(list(WIDTHS))
    assert (width_share(0.1), width_share(0.9)) == (WIDTHS[0], 1.0)
    assert WIDTHS[1] < width_share(0.45) < WIDTHS[2]


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CorpError, match="target_macs"):
        Recipe(tokens="auto", target_params=0.5)
    with pytest.raises(CorpError, match="list"):
        Recipe(tokens=[1.5, 2])
    model, data = build(), batches(2)
    with pytest.raises(CorpError, match="no statistics"):
        corp.prune(model, None, Recipe(tokens=[1, 0]), stats=corp.calibrate(model, data))
    with pytest.raises(CorpError, match="schedule has 2 entries"):
        corp.prune(model, data, Recipe(tokens=[1, 0]))
