"""Small inputs made from a model itself, so that claims about it can be verified without data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, WAVE = 12, 4000
SIDE = 64  # of an image, for models that accept any size (SegFormer)


def examples(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(module, batch) for the model and for models inside it, because every tower of a larger one can run alone."""
    for module in model.modules():
        for batch in candidates(module):
            if batch is not None and len(batch):
                yield module, batch


def candidates(module: Any) -> list[Any]:
    """Small random batches for a model of timm, torchvision or transformers; it may accept some of them or none."""
    config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if isinstance(config, dict) or hasattr(config, "input_size"):
        return [image_like(module, config)]
    patches = getattr(module, "patch_embed", None)
    size, proj = getattr(patches, "img_size", None), getattr(patches, "proj", None)
    if isinstance(size, tuple) and isinstance(proj, nn.Conv2d):
        return [torch.randn(1, proj.in_channels, *size, generator=_draw())]
    if type(module).__module__.startswith("torchvision.models.") and any(
        hasattr(module, head) for head in ("head", "heads", "classifier")
    ):
        side = getattr(module, "image_size", 224)
        return [torch.randn(1, 3, side, side, generator=_draw())]
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        return _varied(module, inputs(module))
    return []


def _varied(model: Any, whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """All inputs; the text alone; features with time first; a larger image; patches in a row."""
    made = [whole]
    if "pixel_values" in whole:
        made.append({key: value for key, value in whole.items() if key != "pixel_values"})
        made.append({**whole, "pixel_values": whole["pixel_values"].repeat(1, 1, 2, 2)})
    if "input_features" in whole:
        made.append({**whole, "input_features": whole["input_features"].mT.contiguous()})
    takes, config = inspect.signature(model.forward).parameters, model.config
    if "input_values" in whole and hasattr(config, "num_mel_bins"):
        length = getattr(config, "max_length", 32)
        made.append({"input_values": torch.randn(1, length, config.num_mel_bins, generator=_draw())})
    vision = getattr(config, "vision_config", None) or config
    if "spatial_shapes" in takes and hasattr(vision, "patch_size"):  # SigLIP 2: a sequence of patches, and their grid
        numbers = getattr(vision, "num_channels", 3) * vision.patch_size**2
        row = torch.randn(1, 4, numbers, generator=_draw())
        shapes = {"pixel_attention_mask": torch.ones(1, 4), "spatial_shapes": torch.tensor([[2, 2]])}
        made.append({**whole, "pixel_values": row, **shapes})
    if "grid_thw" in takes and hasattr(vision, "patch_size"):  # Qwen2-VL's tower and similar
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        numbers = int(channels or 3) * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        made.append(
            {"hidden_states": torch.randn(16, numbers, generator=_draw()), "grid_thw": torch.tensor([[1, 4, 4]])}
        )
    return made


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def image_like(module: Any, config: Any, samples: int = 1) -> Tensor:
    """Images of the size that the patches or the config prescribe, with the model's channels."""
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    channels, height, width = config["input_size"] if isinstance(config, dict) else config.input_size
    channels = next((layer.in_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)), channels)
    height, width = size if isinstance(size, tuple | list) else (height, width)
    return torch.randn(samples, channels, height, width, generator=_draw())


def inputs(model: Any) -> dict[str, Tensor]:
    """A small random batch with the inputs that the forward of a transformers model takes."""
    config = model.config
    takes = inspect.signature(model.forward).parameters
    text, vision = (getattr(config, name, None) or config for name in ("text_config", "vision_config"))
    draw = _draw()
    size = 1 if getattr(config, "pad_token_id", None) is None else 2  # classifiers need padding for more than one
    made: dict[str, Tensor] = {}
    some = SIDE if getattr(model, "main_input_name", None) == "pixel_values" else None
    if "pixel_values" in takes and (side := getattr(vision, "image_size", some)):
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
    if "bbox" in takes and "input_ids" in made:
        made["bbox"] = torch.zeros(*made["input_ids"].shape, 4, dtype=torch.long)
    if type(model).__name__.endswith("ForMultipleChoice") and "input_ids" in made:
        made["input_ids"] = made["input_ids"][:, None].repeat(1, 2, 1)
    if getattr(config, "add_cross_attention", False):
        made["encoder_hidden_states"] = torch.randn(size, 7, config.hidden_size, generator=draw)
    return made
