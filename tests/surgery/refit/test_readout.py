"""Which tokens a model's output is read from."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import corp
from corp.calibration.batches import without_cache
from corp.surgery.refit.blocks import examine
from corp.surgery.refit.readout import tokens_read
from corp.surgery.refit.replay import Block
from tests.helpers import models


def blocks_of(model: nn.Module, batch: Any) -> list[Block]:
    sites = list(corp.find_sites(model))
    with without_cache(model):
        blocks = examine(model, sites, lambda: models.run(model, batch))
        return tokens_read(model, blocks, lambda: models.run(model, batch))


def ends(model: nn.Module, batch: Any) -> dict[str, tuple[int, int]]:
    """(read, all) of the block that a chain ends with."""
    return {block.name: (block.read, block.tokens) for block in blocks_of(model, batch) if block.ends}


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, 1),
        ({"global_pool": "avg"}, 17),
        ({"global_pool": "token", "reg_tokens": 3}, 1),
        ({"global_pool": "", "num_classes": 0}, 17),
    ],
)
def test_of_timm_models(options: dict[str, Any], read: int) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, pretrained=False, **options).double().eval()
    found = ends(model, torch.randn(2, 3, 64, 64, dtype=torch.float64))
    tokens = 17 + options.get("reg_tokens", 0)
    assert found == {"blocks.1": (read, tokens)}


def test_of_two_leading_tokens() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2, pretrained=False)
    found = ends(model.double().eval(), torch.randn(2, 3, 64, 64, dtype=torch.float64))
    assert found == {"blocks.1": (2, 18)}


@pytest.mark.parametrize("family", ["hf-opt", "open-clip-tower", "torch-encoder-sequence-first"])
def test_where_every_token_may_be_read_all_are(family: str) -> None:
    model = models.build(family)
    found = ends(model, models.batches(family)[0])
    assert found
    assert all(read == tokens for read, tokens in found.values())
