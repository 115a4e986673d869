"""timm's smallest ViT with two blocks instead of six and 17 tokens instead of 101, for tests of what is around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from timm.models import _registry
from timm.models.vision_transformer import test_vit
from torch import nn

NAME, SIDE, BLOCKS = "test_vit", 64, 2


@contextmanager
def in_place() -> Iterator[None]:
    """Within this context the name stands for the small one; in other processes it is timm's own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(_registry._model_entrypoints, NAME, _small)
        yield


def whole() -> nn.Module:
    """timm's own."""
    model: nn.Module = test_vit()
    return model


def _small(pretrained: bool = False, pretrained_cfg_overlay: Any = None, **changes: Any) -> nn.Module:
    overlay = {"input_size": (3, SIDE, SIDE), **(pretrained_cfg_overlay or {})}
    model: nn.Module = test_vit(
        pretrained, pretrained_cfg_overlay=overlay, **{"depth": BLOCKS, "img_size": SIDE, **changes}
    )
    return model
