"""Position embeddings at other image sizes survive pruning, saving and loading."""

from __future__ import annotations

from pathlib import Path

import timm
import torch

import corp
from corp.evaluate.heads import patch_map
from tests.helpers.seeds import seed_all

NAME = "vit_tiny_patch16_224"


def test_a_pruned_backbone_takes_the_sizes_that_it_took(tmp_path: Path) -> None:
    seed_all(0)
    model = timm.create_model(NAME, num_classes=0, dynamic_img_size=True).eval()
    result = corp.prune(model, [torch.randn(4, 3, 32, 48)], corp.Recipe(mlp=0.5, compensate="none"))
    corp.save(result, tmp_path / "small")
    loaded = corp.load(tmp_path / "small")
    for height, width in [(32, 48), (64, 32)]:
        x = torch.randn(2, 3, height, width)
        with torch.no_grad():
            expected, found = (patch_map(one, x) for one in (result.model, loaded))
        assert expected.shape[-2:] == (height // 16, width // 16)
        torch.testing.assert_close(found, expected)
