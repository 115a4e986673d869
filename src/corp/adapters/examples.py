"""Small inputs made from a model itself, so that claims about it can be tried out before there are data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, WAVE = 12, 4000


def examples(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(module, batch) for the model and for models inside it: every tower of a larger one can be run alone."""
    for module in model.modules():
        batch = example(module)
        if batch is not None and len(batch):
            yield module, batch


def example(module: Any) -> Any:
    """A small random batch for a model of timm, torchvision or transformers; None where it does not say what it takes."""
    config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if isinstance(config, dict) or hasattr(config, "input_size"):
        return image_like(module, config)
    patches = getattr(module, "patch_embed", None)
    if isinstance(size := getattr(patches, "img_size", None), tuple) and isinstance(
        proj := getattr(patches, "proj", None), torch.nn.Conv2d
    ):
        return torch.randn(1, proj.in_channels, *size, generator=_draw())
    if isinstance(getattr(module, "image_size", None), int) and hasattr(module, "conv_proj"):
        return torch.randn(1, 3, module.image_size, module.image_size, generator=_draw())
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        return inputs(module)
    return None


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def image_like(module: Any, config: Any) -> Tensor:
    """Of the size that the patches were made for, or that the config names."""
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    channels, height, width = config["input_size"] if isinstance(config, dict) else config.input_size
    height, width = size if isinstance(size, tuple | list) else (height, width)
    return torch.randn(1, channels, height, width, generator=_draw())


def inputs(model: Any) -> dict[str, Tensor]:
    """A small random batch with the inputs that the forward of a transformers model takes."""
    config = model.config
    takes = inspect.signature(model.forward).parameters
    text, vision = (getattr(config, name, None) or config for name in ("text_config", "vision_config"))
    draw = _draw()
    size = 1 if getattr(config, "pad_token_id", None) is None else 2  # classifiers want padding for more than one
    made: dict[str, Tensor] = {}
    if "pixel_values" in takes and (side := getattr(vision, "image_size", None)):
        height, width = side if isinstance(side, list | tuple) else (side, side)
        made["pixel_values"] = torch.randn(size, getattr(vision, "num_channels", 3), height, width, generator=draw)
    if "input_features" in takes and hasattr(config, "num_mel_bins"):
        length = 2 * getattr(config, "max_source_positions", 16)
        made["input_features"] = torch.randn(size, config.num_mel_bins, length, generator=draw)
    if "input_values" in takes:
        made["input_values"] = torch.randn(size, WAVE, generator=draw)
    sound = "input_features" in made or "input_values" in made
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None)
    if isinstance(vocabulary, dict | list):
        vocabulary = None
    for name in ("input_ids", "decoder_input_ids"):
        if name in takes and vocabulary and (name != "input_ids" or not sound):
            low = min(3, vocabulary - 1)
            made[name] = torch.randint(low, vocabulary, (size, TOKENS), generator=draw)
    if type(model).__name__.endswith("ForMultipleChoice") and "input_ids" in made:
        made["input_ids"] = made["input_ids"][:, None].repeat(1, 2, 1)
    if getattr(config, "add_cross_attention", False):
        made["encoder_hidden_states"] = torch.randn(size, 7, config.hidden_size, generator=draw)
    return made
