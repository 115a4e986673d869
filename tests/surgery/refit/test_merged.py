"""Where tokens can be merged is found by trying; refitting on the merged stream brings the output nearer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import corp
from corp import Recipe, find_sites
from corp.errors import ModelError
from corp.planning.merging import Merging
from corp.steps.allocation.tokens import merged_copy
from corp.surgery.linear import refill
from corp.surgery.refit.merged import find_merging, repair_merged
from corp.surgery.refit.recording import record_batches
from corp.surgery.refit.repair import find_blocks, require_whole
from tests.helpers import models

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
FOUND = {
    "vit": Merging("blocks", (0, 0), 1, read=1),
    "deit-distilled": Merging("blocks", (0, 0), 2, read=2),
    "dinov2-registers": Merging("blocks", (0, 0), 5, read=1),
    "no-class-token": Merging("blocks", (0, 0), 0, unmerge=True),
    "siglip": Merging("blocks", (0, 0), 0, unmerge=True),
    "hf-vit": Merging("vit.layers", (0, 0), 1, read=1),
    "hf-dinov2": Merging("encoder.layer", (0, 0), 1, unmerge=True),
}


def small(batch: Any) -> Any:
    return {key: value[:4] for key, value in batch.items()} if isinstance(batch, dict) else batch[:4]


@pytest.mark.parametrize("family", FOUND)
def test_prefix_and_read_tokens_are_found_by_trying(family: str) -> None:
    model, batch = models.build(family), small(models.batches(family, count=1)[0])
    assert find_merging(model, find_sites(model), batch) == FOUND[family]


def test_batches_may_hold_more_than_images() -> None:
    """What is no tensor of real numbers stays as it is when images are changed."""
    model, images = models.build("vit"), small(models.batches("vit", count=1)[0])
    batch = {"images": [images, (images,)], "labels": torch.arange(4), "size": 16, "name": "a", "mask": None}

    def forward(made: nn.Module, given: Any) -> Any:
        assert (given["size"], given["name"], given["mask"]) == (16, "a", None)
        assert torch.equal(given["labels"], torch.arange(4))
        assert type(given["images"]) is list
        return made(given["images"][1][0])

    assert find_merging(model, find_sites(model), batch, forward) == FOUND["vit"]


class Intermediate(nn.Module):
    """Reads the first block's tokens, as decoders for depth and segmentation do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = models.build("vit")

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.backbone.get_submodule("blocks.0").register_forward_hook(
            lambda _m, _a, y: seen.append(y[0] if isinstance(y, tuple) else y)
        )
        self.backbone(x)
        handle.remove()
        return seen[0]


@pytest.mark.parametrize("family", ["hf-bert", "hf-clip", "torchvision-vit"])
def test_models_without_one_sequence_of_patches_are_refused(family: str) -> None:
    model, batch = models.build(family), small(models.batches(family, count=1)[0])
    with pytest.raises(ModelError, match=r"nothing to merge|one sequence of blocks|numbered from 0"):
        find_merging(model, find_sites(model), batch)


class Twice(nn.Module):
    """Runs its blocks twice, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = models.build("vit")

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x) + self.backbone(x)


def test_a_model_that_runs_its_blocks_twice_is_refused() -> None:
    model, batch = Twice(), models.batches("vit", count=1)[0][:4]
    with pytest.raises(ModelError, match=r"backbone\.blocks\.0 runs 2 times in a forward pass"):
        find_merging(model, find_sites(model), batch)


def test_a_model_that_reads_other_blocks_is_refused() -> None:
    model, batch = Intermediate(), models.batches("vit", count=1)[0][:4]
    with pytest.raises(ModelError, match=r"not read from the end of backbone\.blocks alone"):
        find_merging(model, find_sites(model), batch)


@pytest.mark.parametrize("family", ["vit", "deit3-layerscale"])
@pytest.mark.parametrize("widths", [False, True], ids=["tokens", "tokens and widths"])
def test_refitting_brings_the_output_nearer_to_the_dense_one(family: str, widths: bool) -> None:
    model, batches = models.build(family), models.batches(family, count=4)
    recipe = Recipe(mlp=0.5, sequential=False)
    merged = merged_copy(model, Merging("blocks", (5, 3), 1))
    smaller = corp.prune(merged, batches, recipe).model if widths else merged
    expected = torch.cat([models.run(model, batch) for batch in batches])

    def error() -> float:
        return float((torch.cat([models.run(smaller, batch) for batch in batches]) - expected).norm())

    before, sites = error(), find_sites(model)
    sequential = replace(recipe, sequential=True)
    blocks = find_blocks(model, sites, sequential, batches)
    passages = record_batches(model, sites, batches, blocks, sequential, 200)
    corrected, end = repair_merged(model, smaller, blocks, passages, replace(recipe, skip=("blocks.0.mlp",)))
    assert error() < 0.9 * before
    assert corrected
    require_whole(smaller, blocks, end, lambda: models.run(smaller, batches[0]), 0.5)
    assert "blocks.0.mlp" not in corrected
    assert all(0 <= one["left"] <= one["gap"] for one in corrected.values())


def test_one_batch_is_enough_to_refit_on_the_merged_stream() -> None:
    model, batches = models.build("vit"), models.batches("vit", count=1)
    merged, sites = merged_copy(model, Merging("blocks", (5, 3), 1)), find_sites(model)
    recipe, expected = Recipe(mlp=0.5, sequential=True), models.run(model, batches[0])
    before = float((models.run(merged, batches[0]) - expected).norm())
    blocks = find_blocks(model, sites, recipe, batches)
    repair_merged(model, merged, blocks, record_batches(model, sites, batches, blocks, recipe, 50), recipe)
    assert float((models.run(merged, batches[0]) - expected).norm()) < before


def test_a_weight_that_changes_after_its_refit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without merging: one per mille off in a layer that the stream has passed, and no model is returned."""
    model, data = models.build("vit"), models.batches("vit", count=4)

    def tampering(smaller: Any, name: str, folded: Any, *, bias: bool) -> None:
        refill(smaller, name, folded, bias=bias)
        if name == "blocks.1.attn.proj":
            smaller.blocks[0].mlp.fc2.weight.data *= 1.001

    monkeypatch.setattr("corp.surgery.refit.layer.refill", tampering)
    with pytest.raises(ModelError, match=r"self-check: the refitted model does not reproduce its refit \(blocks\.1\)"):
        corp.prune(model, data, Recipe(mlp=0.5, tokens=(5, 0), sequential=True))


def test_a_few_samples_may_be_grouped_otherwise() -> None:
    """Where similarities tie, rounding decides; half of the samples must agree."""
    model, data = models.build("vit"), models.batches("vit", count=1)
    sites, recipe = find_sites(model), Recipe(mlp=0.5, sequential=True)
    blocks, found = find_blocks(model, sites, recipe, data), list[Tensor]()
    handle = model.get_submodule("blocks.1").register_forward_hook(lambda _m, _a, output: found.append(output))
    models.run(model, data[0])
    handle.remove()
    (end,) = found
    half = len(end) // 2
    for wrong, passes in ((half, True), (half + 1, False)):
        changed = end.clone()
        changed[:wrong] += 1
        context = nullcontext() if passes else pytest.raises(ModelError, match="does not reproduce its refit")
        with context:
            require_whole(model, blocks, changed, lambda: models.run(model, data[0]), 0.5)
    with pytest.raises(ModelError, match="does not reproduce its refit"):
        require_whole(model, blocks, changed, lambda: models.run(model, data[0]))
