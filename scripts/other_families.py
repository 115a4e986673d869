"""Small models of libraries that corp does not install, for coverage.py: open_clip and torchaudio where they exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Family(NamedTuple):
    """A family of models: how to build a small one and, if corp cannot make its input, what to call it with."""

    library: str
    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...] | None = None


def other_libraries() -> list[Any]:
    """Those of the libraries that are installed."""
    return [import_module(name) for name in ("open_clip", "torchaudio") if find_spec(name)]


def other_families() -> Iterator[Family]:
    """The families of those libraries that are installed."""
    if find_spec("open_clip"):
        yield from _open_clip()
    if find_spec("torchaudio"):
        yield from _torchaudio()


def _open_clip() -> Iterator[Family]:
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP, CustomTextCLIP

    image: dict[str, Any] = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    timm = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "map", "timm_proj": "none", "image_size": 224}
    pooled = {**image, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
    captions = {**text, "embed_cls": True, "output_tokens": True}
    ids = torch.randint(1, 60, (2, 12))
    images, large = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 224, 224)
    yield Family("open_clip", "CLIP (ViT)", lambda: CLIP(32, image, text), (images, ids))
    yield Family("open_clip", "CustomTextCLIP (ViT)", lambda: CustomTextCLIP(32, image, text), (images, ids))
    yield Family("open_clip", "CustomTextCLIP (timm)", lambda: CustomTextCLIP(192, timm, text), (large, ids))
    yield Family("open_clip", "CoCa", lambda: CoCa(32, text, captions, pooled), (images, ids))


def _torchaudio() -> Iterator[Family]:
    from torchaudio import models

    def speech(norm: str, first: bool, build: Callable[..., nn.Module], *more: int) -> nn.Module:
        """The arguments are those of a wav2vec2 of two layers, four heads and 48 hidden channels."""
        convolutions = [(32, 10, 5), (32, 8, 4)]
        return build(norm, convolutions, first, 32, 0.0, 16, 4, 2, 4, *more, 0.0, 48, 0.0, 0.0, first, 0.0, 10)

    waves, frames, lengths = torch.randn(2, 1600), torch.randn(2, 21, 32), torch.tensor([20, 20])
    wav2vec2, wavlm = models.wav2vec2_model, models.wavlm_model
    yield Family("torchaudio", "wav2vec2, post-norm", lambda: speech("group_norm", False, wav2vec2), (waves,))
    yield Family("torchaudio", "wav2vec2, pre-norm", lambda: speech("layer_norm", True, wav2vec2), (waves,))
    yield Family("torchaudio", "WavLM", lambda: speech("group_norm", False, wavlm, 32, 128), (waves,))
    yield Family("torchaudio", "Conformer", lambda: models.Conformer(32, 4, 48, 2, 3), (frames[:, :20], lengths))
    emformer = (frames, lengths)
    yield Family("torchaudio", "Emformer", lambda: models.Emformer(32, 4, 48, 2, 4, right_context_length=1), emformer)
