"""Heads for dense prediction: from a backbone's patch features to a map per image; stored without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corp.errors import ModelError, StorageError
from corp.io.files import write_tensors, writing

SEGMENTATION, DEPTH = "segmentation", "depth"
TASKS = (SEGMENTATION, DEPTH)
IGNORE = 255  # the label of unlabelled pixels, by the convention of PASCAL VOC and Cityscapes
LEAST_DEPTH = 1e-3  # metres; a linear head may predict depths below zero
METADATA = "corp_head"


@dataclass(frozen=True)
class HeadInfo:
    """What a head predicts and reads: features of the last `blocks` blocks, concatenated, at this image size."""

    task: str = SEGMENTATION
    blocks: int = 1
    ignore: int = IGNORE
    image_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ModelError(f"task={self.task!r} is not one of {', '.join(TASKS)}")
        if type(self.blocks) is not int or self.blocks < 1:
            raise ModelError(f"blocks={self.blocks!r}: a head reads at least one block")
        size = self.image_size
        if size is not None:
            if not isinstance(size, list | tuple) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
                raise ModelError(f"image_size={size!r} is not (height, width)")
            object.__setattr__(self, "image_size", tuple(size))  # JSON has lists only


class LinearHead(nn.Module):
    """One linear map of every patch's features: a 1 x 1 convolution."""

    def __init__(self, width: int, outputs: int, *, least: float | None = None) -> None:
        super().__init__()
        self.width, self.least = width, least
        self.weight = nn.Parameter(torch.zeros(outputs, width))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, K, h, w)."""
        maps = nn.functional.conv2d(features, self.weight[..., None, None], self.bias)
        return maps if self.least is None else maps.clamp(min=self.least)


class UpsamplingHead(nn.Module):
    """Transposed convolutions, each doubling the map, with batch norm and ReLU, and a 1 x 1 convolution at the end."""

    def __init__(self, widths: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.width, self.steps = widths[0], len(widths) - 1
        for i in range(self.steps):
            self.add_module(f"upconv{i + 1}", nn.ConvTranspose2d(widths[i], widths[i + 1], 4, stride=2, padding=1))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self.final_conv = nn.Conv2d(widths[-1], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, K, 2^steps h, 2^steps w)."""
        for i in range(1, self.steps + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"upconv{i}")(x)).relu()
        maps: Tensor = self.final_conv(x)
        return maps


Head = LinearHead | UpsamplingHead


class WithHead(nn.Module):
    """A backbone under a head, from images (B, 3, H, W) to maps (B, K, h, w).

    Pruning both together tells corp that every patch is read, and from which blocks; the head has no sites and does
    not change.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, blocks: int = 1) -> None:
        super().__init__()
        self.backbone, self.head, self.blocks = backbone, head, blocks
        here, read = width_of(backbone), getattr(head, "width", None)
        if here is not None and isinstance(read, int) and here * blocks != read:
            raise ModelError(
                f"the head reads {read} channels, but {blocks} block(s) of {type(backbone).__name__} give "
                f"{here * blocks}; use the backbone that the head was fitted on"
            )

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.head(patch_map(self.backbone, images, self.blocks))
        return maps


class OwnMaps(nn.Module):
    """A whole model of transformers that predicts maps itself, as a module that returns the map (B, K, h, w)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(pixel_values=images)
        depth, logits = getattr(output, "predicted_depth", None), getattr(output, "logits", None)
        maps = depth if depth is not None else logits
        if not isinstance(maps, Tensor) or maps.dim() not in (3, 4):
            raise ModelError(f"{type(self.model).__name__} predicts no map; give a backbone and a head")
        return maps[:, None] if maps.dim() == 3 else maps


def task_of(model: nn.Module) -> str | None:
    """The dense task that a whole model of transformers is made for, by its class name; None for others."""
    name = type(model).__name__
    made_for = {"ForDepthEstimation": DEPTH, "SemanticSegmentation": SEGMENTATION}
    return next((task for ending, task in made_for.items() if name.endswith(ending)), None)


def width_of(backbone: nn.Module) -> int | None:
    """The number of channels of the backbone's features, if known."""
    config = getattr(backbone, "config", None)
    found = getattr(backbone, "embed_dim", None) or getattr(config, "hidden_size", None)
    return found if isinstance(found, int) else None


def patch_map(backbone: nn.Module, images: Tensor, blocks: int = 1) -> Tensor:
    """The patch tokens of the last blocks after the final norm, as a map (B, blocks C, h, w); no prefix tokens."""
    inside = getattr(backbone, "forward_intermediates", None)  # of timm
    if callable(inside):
        _require_blocks(backbone, blocks, len(getattr(backbone, "blocks", ())) or blocks)
        return torch.cat(inside(images, indices=blocks, norm=True, intermediates_only=True), 1)
    if hasattr(backbone, "config"):  # of transformers
        output: Any = backbone(pixel_values=images, output_hidden_states=True)
        _require_blocks(backbone, blocks, len(output.hidden_states) - 1)
        norm = getattr(backbone, "layernorm", nn.Identity())
        prefix = 1 + int(getattr(backbone.config, "num_register_tokens", 0))
        return torch.cat([_as_map(backbone, norm(x), images, prefix) for x in output.hidden_states[-blocks:]], 1)
    forward_features = getattr(backbone, "forward_features", None)
    if not callable(forward_features):
        raise ModelError(f"{type(backbone).__name__} has no forward_features to take patch tokens from")
    _require_blocks(backbone, blocks, 1)
    tokens = forward_features(images)  # (B, prefix + h w, C)
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise ModelError(f"forward_features of {type(backbone).__name__} does not give tokens (images, tokens, width)")
    return _as_map(backbone, tokens, images, int(getattr(backbone, "num_prefix_tokens", 1)))


def _require_blocks(backbone: nn.Module, wanted: int, there: int) -> None:
    if wanted > there:
        raise ModelError(f"the head reads {wanted} blocks, but {type(backbone).__name__} gives the features of {there}")


def _as_map(backbone: nn.Module, tokens: Tensor, images: Tensor, prefix: int) -> Tensor:
    """(B, prefix + h w, C) -> (B, C, h, w)."""
    patches = tokens.shape[1] - prefix
    height, width = images.shape[-2:]
    h = round((patches * height / width) ** 0.5)  # patches are square, so the grid has the image's proportions
    if h < 1 or patches % h:
        raise ModelError(
            f"{tokens.shape[1]} tokens less {prefix} prefix tokens do not fill a grid for {height} x {width} images; "
            f"set num_prefix_tokens on the {type(backbone).__name__}"
        )
    return tokens[:, prefix:].mT.reshape(len(tokens), -1, h, patches // h)


def save_head(head: Head, info: HeadInfo, path: str | Path, *, overwrite: bool = False) -> None:
    """Write the head to a safetensors file, which describes itself in its metadata."""
    place = Path(path)
    if place.is_dir() or (place.exists() and not overwrite):
        raise StorageError(f"{place} exists; choose another output, or pass overwrite=True")
    beside = place.with_name(f".{place.name}.partial")
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(beside, state, {METADATA: json.dumps(asdict(info))})
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)


def load_head(path: str | Path) -> tuple[Head, HeadInfo]:
    """The head in float32 and what it predicts. A file without corp's metadata is treated as a segmentation head."""
    try:
        with safe_open(path, "pt") as file:
            info = _info(path, (file.metadata() or {}).get(METADATA, "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as a head (a .safetensors file): {error}") from error
    head = _built(path, state, info)
    try:
        head.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {type(head).__name__}: {' '.join(str(error).split())[:200]}") from error
    return head.eval(), info


def _info(path: str | Path, text: str) -> HeadInfo:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: the description of the head is not JSON: {error}") from error
    if not isinstance(raw, dict) or not set(raw) <= {field.name for field in fields(HeadInfo)}:
        raise ModelError(f"{path} describes a head that this version of corp does not know: {text[:100]}")
    return HeadInfo(**raw)


def _built(path: str | Path, state: dict[str, Tensor], info: HeadInfo) -> Head:
    """The module for tensors of these names and shapes, with parameters still to be filled."""
    final, weight = state.get("final_conv.weight"), state.get("weight")
    steps = [state[name] for i in range(1, len(state)) if (name := f"upconv{i}.weight") in state]
    if final is not None and final.dim() == 4 and steps and all(step.dim() == 4 for step in steps):
        head = UpsamplingHead([steps[0].shape[0], *(step.shape[1] for step in steps)], final.shape[0])
        for i in range(head.steps):  # files may lack the number of batches, which nothing uses
            state.setdefault(f"bn{i + 1}.num_batches_tracked", torch.tensor(0))
        return head
    if weight is not None and weight.dim() == 2:
        return LinearHead(weight.shape[1], weight.shape[0], least=LEAST_DEPTH if info.task == DEPTH else None)
    raise ModelError(
        f"{path} is not a head that corp knows: it holds {', '.join(sorted(state)[:4])} …; a linear head has weight "
        "(K, C) and bias (K), an upsampling head upconvN, bnN and final_conv"
    )
