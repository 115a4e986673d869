"""A token schedule meets its budget, and is the best of those that were tried on held-out data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from corp import Recipe
from corp.errors import DataError, PlanError
from corp.measure.closeness import Reference
from corp.measure.cost import count_macs
from corp.planning.merging import Merging
from corp.steps.allocation.tokens import (
    choose_schedule,
    few,
    first_sample,
    in_every_second,
    mac_share,
    merged_copy,
    tilt,
)
from tests.helpers import models

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
CLASS_TOKEN = Merging("blocks", (0, 0), 1, read=1)
PATCHES = Merging("blocks", (0, 0), 0, unmerge=True)


@pytest.mark.parametrize(("family", "merging"), [("vit", CLASS_TOKEN), ("no-class-token", PATCHES)])
def test_the_share_is_what_torch_counts(family: str, merging: Merging) -> None:
    model, (batch, *_) = models.build(family), models.batches(family)
    share = mac_share(model, batch, merging)
    for first in (0, 3, 8):
        trial = Merging(merging.blocks, (first, 0), merging.prefix, merging.read, merging.unmerge)
        counted = count_macs(merged_copy(model, trial), batch[:1]) / count_macs(model, batch[:1])
        assert share(trial) == pytest.approx(counted, abs=1e-12)


def test_the_share_knows_narrowed_blocks() -> None:
    model = models.prune(models.build("vit"), models.batches("vit"), Recipe(mlp=0.5, attn=0.5, vo=0.25)).model
    one = models.batches("vit")[0][:1]
    trial = Merging("blocks", (4, 0), 1, read=1)
    counted = count_macs(merged_copy(model, trial), one) / count_macs(model, one)
    assert mac_share(model, one, CLASS_TOKEN)(trial) == pytest.approx(counted, abs=1e-12)


def test_a_schedule_meets_its_budget_and_is_the_best_that_was_tried() -> None:
    model, held = models.build("no-class-token"), models.batches("no-class-token", count=2)
    chosen = choose_schedule(model, held, PATCHES, 0.8)
    assert chosen.cost <= 0.8
    assert chosen.divergence == min(one["divergence"] for one in chosen.tried)
    moved = Reference(model, few(held)).compare(merged_copy(model, chosen.merging)).divergence().value
    assert moved == pytest.approx(chosen.divergence)
    even = min(chosen.tried, key=lambda one: abs(one["schedule"][0] - one["schedule"][1]))
    assert chosen.divergence <= even["divergence"]


def test_what_cannot_be_reached_is_refused() -> None:
    model, held = models.build("vit"), models.batches("vit", count=1)
    with pytest.raises(PlanError, match=r"cannot reach 0\.100 of the dense model's cost; prune widths too"):
        choose_schedule(model, held, CLASS_TOKEN, 0.1)
    with pytest.raises(DataError, match="there are none"):
        few([])


def test_a_tilt_moves_merging_to_later_blocks_and_back() -> None:
    shape = [1.0, 1.0, 1.0]
    later = tilt(shape, 0.5)
    assert later[0] < later[1] == 1.0 < later[2]
    assert tilt(later, -0.5) == pytest.approx(shape)


def test_half_as_many_merges_take_as_many_tokens() -> None:
    assert in_every_second([1.0, 2.0, 3.0, 4.0]) == [0.0, 3.0, 0.0, 7.0]
    assert in_every_second([1.0, 2.0, 3.0]) == [0.0, 3.0, 0.0]


def test_the_first_sample_of_any_batch() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    found = first_sample({"pixels": x, "pair": (x, [x, "text"])})
    assert torch.equal(found["pixels"], x[:1])
    assert torch.equal(found["pair"][1][0], x[:1])
    assert found["pair"][1][1] == "text"


def test_nothing_is_changed_by_choosing() -> None:
    model, held = models.build("vit"), models.batches("vit", count=1)
    before = copy.deepcopy(model.state_dict())
    choose_schedule(model, held, CLASS_TOKEN, 0.7)
    assert type(model.get_submodule("blocks")) is nn.Sequential
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
