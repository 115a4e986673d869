"""Images of 1,024 pixels: sampled tokens come from every region, and calibration makes no tensor of tokens x tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import corp
from corp.calibration.settings import Settings
from corp.calibration.tokens import choose_tokens
from tests.helpers.seeds import seed_all

SIDE = 73  # patches of 14 on 1,022 pixels


@pytest.mark.parametrize("tokens", [SIDE, 2 * SIDE, 244, 300])
def test_the_tokens_of_one_image_come_from_every_region(tokens: int) -> None:
    position = torch.arange(1 + SIDE**2, dtype=torch.float64)[None, :, None]
    chosen = choose_tokens(position, tokens, 5)
    assert chosen is not None
    assert len(chosen.unique()) == tokens
    patch = chosen.flatten().long().clamp(min=1) - 1
    regions = (patch // SIDE * 4 // SIDE) * 4 + patch % SIDE * 4 // SIDE  # a grid of 4 x 4
    counts = regions.bincount(minlength=16)
    assert counts.min() > 0.4 * tokens / 16
    assert counts.max() < 2 * tokens / 16


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return result


@pytest.mark.parametrize("tokens", ["auto", 200, "all"])
def test_calibration_holds_a_few_times_the_activations_of_a_large_image(tokens: str | int) -> None:
    seed_all(0)
    model = VisionTransformer(
        img_size=1024, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=0, dynamic_img_size=True
    ).eval()
    n = 1 + 64**2
    photo = torch.randn(1, 3, 1024, 1024)
    with Largest() as seen:
        stats = corp.calibrate(model, [photo], settings=Settings(tokens=tokens))
    # The hidden states of an MLP or the image itself, not tokens x tokens.
    assert seen.numbers <= max(64 * n, photo.numel()) < n * n / 4
    fitted = stats.moments_of("blocks.0.mlp").total().n
    assert fitted == (200 if tokens == 200 else n)
