"""Dense heads read every patch, and some read several blocks: what sequential fitting makes of that."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import corp
from corp.errors import ModelError
from corp.evaluate.heads import LinearHead, WithHead, patch_map
from corp.surgery.refit.blocks import examine
from corp.surgery.refit.merged import find_merging
from corp.surgery.refit.readout import tokens_read
from tests.helpers.models import SMALL
from tests.helpers.seeds import seed_all, seeded

BLOCKS = 3


@pytest.fixture(scope="module")
def model() -> WithHead:
    seed_all(1)
    backbone = VisionTransformer(**{**SMALL, "depth": 4, "num_classes": 0}, init_values=0.5, reg_tokens=2)
    head = LinearHead(24 * BLOCKS, 5)
    for parameter in (*backbone.parameters(), *head.parameters()):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return WithHead(backbone, head, BLOCKS).double().eval()


def data(seed: int, count: int = 60) -> Tensor:
    generator = seeded(seed)
    mix = torch.randn(40, 3 * 16 * 16, generator=seeded(0), dtype=torch.float64)
    return (torch.randn(count, 40, generator=generator, dtype=torch.float64) @ mix / 6).unflatten(1, (3, 16, 16))


def tap_errors(dense: WithHead, pruned: nn.Module, x: Tensor) -> Tensor:
    """The relative squared error of each block's features, (BLOCKS,)."""
    assert isinstance(pruned, WithHead)
    with torch.no_grad():
        a, b = (patch_map(one.backbone, x, BLOCKS).unflatten(1, (BLOCKS, -1)) for one in (dense, pruned))
    return (a - b).square().sum((0, 2, 3, 4)) / a.square().sum((0, 2, 3, 4))


def test_under_a_head_every_token_counts(model: WithHead) -> None:
    run, sites = (lambda: model(data(1, 2))), list(corp.find_sites(model))
    blocks = tokens_read(model, examine(model, sites, run), run)
    assert [(block.read, block.tokens) for block in blocks] == [(19, 19)] * 4
    alone = model.backbone
    run, sites = (lambda: alone(data(1, 2))), list(corp.find_sites(alone))
    assert tokens_read(alone, examine(alone, sites, run), run)[-1].read == 1  # its own output is the class token


def test_sequential_fitting_holds_the_features_of_all_blocks_that_a_head_reads(model: WithHead) -> None:
    batches, unseen = list(data(2, 300).split(50)), data(3)
    once, again = (
        corp.prune(model, batches, corp.Recipe(mlp=0.5, attn=0.3, sequential=sequential))
        for sequential in (False, True)
    )
    before, after = (tap_errors(model, result.model, unseen) for result in (once, again))
    assert bool((after < 0.95 * before).all()), (before, after)


def test_the_head_the_class_token_and_the_registers_stay_as_they_are(model: WithHead) -> None:
    pruned = corp.prune(model, [data(4)], corp.Recipe(mlp=0.5, attn=0.5)).model
    assert isinstance(pruned, WithHead)
    assert all(torch.equal(a, b) for a, b in zip(pruned.head.parameters(), model.head.parameters(), strict=True))
    for name in ("cls_token", "reg_token", "pos_embed"):
        assert torch.equal(getattr(pruned.backbone, name), getattr(model.backbone, name)), name


class InnerPatches(nn.Module):
    """Reads the patches of the block before the last, and of the last block only the class token."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner, last = self.backbone.get_intermediate_layers(x, 2, return_prefix_tokens=True)
        return inner[0], last[1][:, 0]


def test_patches_that_are_read_from_an_inner_block_count_there(model: WithHead) -> None:
    outer = InnerPatches(model.backbone)
    run, sites = (lambda: outer(data(1, 2))), list(corp.find_sites(outer))
    blocks = tokens_read(outer, examine(outer, sites, run), run)
    assert [block.read for block in blocks][-2:] == [19, 1]


def test_tokens_are_merged_under_a_head_that_reads_several_blocks(model: WithHead) -> None:
    batches, unseen = list(data(2, 200).split(50)), data(3)
    once, again = (
        corp.prune(model, batches, corp.Recipe(mlp=0.5, tokens=(1, 1, 0, 0), sequential=sequential))
        for sequential in (False, True)
    )
    merging = again.plan.merging
    assert merging is not None
    assert (merging.prefix, merging.read, merging.unmerge) == (3, None, True)
    before, after = (tap_errors(model, result.model, unseen) for result in (once, again))
    assert bool((after < before).all()), (before, after)
    assert bool((before > 1e-6).all()), before  # they were merged


def test_tokens_are_not_merged_where_blocks_are_called_one_by_one_and_patches_are_not_read(model: WithHead) -> None:
    class Classes(InnerPatches):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return torch.cat(
                [y[1][:, 0] for y in self.backbone.get_intermediate_layers(x, 2, return_prefix_tokens=True)], 1
            )

    outer = Classes(model.backbone)
    with pytest.raises(ModelError, match="one by one"):
        find_merging(outer, corp.find_sites(outer), data(1, 2))
