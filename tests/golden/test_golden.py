"""Folders that an earlier version wrote (scripts/golden.py) load with the same bits from now on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import corp
from corp.errors import CorpWarning
from scripts.golden import EXPECTED, GOLDEN, digests, image_model, images, outputs, sums_of, tokens

EXPECTATIONS: dict[str, Any] = json.loads((GOLDEN / EXPECTED).read_text(encoding="utf-8"))


def check(model: nn.Module, name: str, inputs: Tensor) -> None:
    """The weights have the recorded bits; outputs may round otherwise on another processor."""
    expected = EXPECTATIONS[name]
    state = {key: value for key, value in model.state_dict().items() if key in expected["state"]}
    assert digests(state) == expected["state"]
    found, recorded = (
        torch.tensor(rows, dtype=torch.float64) for rows in (outputs(model, inputs), expected["outputs"])
    )
    torch.testing.assert_close(found, recorded, rtol=1e-9, atol=1e-9)


def test_compact_folders() -> None:
    check(corp.load(GOLDEN / "compact", base=image_model()), "compact", images(2, 2))
    check(corp.load(GOLDEN / "compact-language"), "compact-language", tokens(2, 2))


def test_an_exported_folder() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "export", dtype="auto").eval()
    check(model, "export", tokens(2, 2))


def test_statistics() -> None:
    stats = corp.Statistics.load(GOLDEN / "statistics")
    assert stats.samples == EXPECTATIONS["statistics"]["samples"]
    assert digests(sums_of(stats)) == EXPECTATIONS["statistics"]["sums"]


def test_a_plan(tmp_path: Path) -> None:
    plan = corp.Plan.load(GOLDEN / "plan" / "plan.json")
    assert {site.name: [site.kind, site.width, site.keep] for site in plan.sites} == EXPECTATIONS["plan"]
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads((GOLDEN / "plan" / "plan.json").read_text())


def test_a_plan_and_statistics_still_make_the_model() -> None:
    stats, plan = corp.Statistics.load(GOLDEN / "statistics"), corp.Plan.load(GOLDEN / "plan" / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CorpWarning)
        made = corp.apply(image_model(), stats, plan).model
    found = torch.tensor(outputs(made, images(2, 2)))
    torch.testing.assert_close(found, torch.tensor(EXPECTATIONS["compact"]["outputs"]), rtol=1e-6, atol=1e-6)


def test_other_bits_would_be_noticed() -> None:
    state = dict(corp.load(GOLDEN / "compact", base=image_model()).state_dict())
    name = next(iter(state))
    state[name] = torch.nextafter(state[name], state[name] + 1)
    assert digests(state)[name] != EXPECTATIONS["compact"]["state"][name]


@pytest.mark.parametrize("name", ["compact", "compact-language", "statistics", "plan", "export"])
def test_golden_folders_stay_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (GOLDEN / name).rglob("*")) < 250_000
