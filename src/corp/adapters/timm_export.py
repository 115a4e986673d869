"""Pruned timm models as timm itself saves them and creates them from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from corp.adapters.examples import image_like
from corp.adapters.registry import Library, find_sites
from corp.adapters.timm_models import from_folder
from corp.adapters.timm_vit import rebuild
from corp.errors import ModelError, StorageError


def resize(identity: dict[str, Any], widths: dict[str, int], _biases: bool) -> dict[str, Any]:
    """The arguments of the model with these MLP widths, which timm expresses as one ratio to the model's width."""
    model = _build(identity)
    sites = find_sites(model).mlp
    if widths == {site.name: site.width for site in sites}:
        return identity
    several = sorted(set(widths.values()))
    if not isinstance(getattr(model, "embed_dim", None), int):
        raise StorageError(f"{identity['architecture']} has no mlp_ratio of one width; use profile='compat'")
    if len(several) > 1:
        raise StorageError(
            f"the MLPs are {several[0]} to {several[-1]} channels wide, but timm has one mlp_ratio for all of them; "
            "use profile='compat', or prune all MLPs alike (one sparsity, no skip or override)"
        )
    up = sites[0].up
    packed = sum(rows.module == up[0].module for rows in up)  # gate and up in one linear count twice
    # timm truncates ratio x width: adding a half prevents losing a channel to rounding.
    ratio = (packed * several[0] + 0.5) / model.embed_dim
    resized = {**identity, "args": {**identity.get("args", {}), "mlp_ratio": ratio}}
    if widths != {site.name: site.width for site in find_sites(_build(resized)).mlp}:
        raise StorageError(
            f"no mlp_ratio makes all MLPs of {identity['architecture']} {several[0]} channels wide; "
            "use profile='compat'"
        )
    return resized


def _build(identity: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return rebuild(identity)


def write(model: nn.Module, identity: dict[str, Any], folder: Path) -> None:
    """Write weights as safetensors, and a config.json with architecture, arguments and preprocessing."""
    args = {key: value for key, value in identity.get("args", {}).items() if key != "num_classes"}
    save_for_hf(model, str(folder), model_args=args, safe_serialization=True)


def read(_identity: dict[str, Any], folder: Path, dtype: torch.dtype) -> nn.Module:
    try:
        return from_folder(folder).to(dtype)
    except ModelError as error:
        raise StorageError(f"what timm saved does not load: {error}") from error


def example(model: nn.Module) -> Tensor:
    made: Any = model  # timm's models have attributes that nn.Module does not declare
    return image_like(made, made.pretrained_cfg, samples=2)


def companions(_sources: list[str], _folder: Path) -> list[str]:
    return []  # the preprocessing is part of the config


def call(_identity: dict[str, Any], folder: str) -> str:
    return f"import timm\n\nmodel = timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)"


LIBRARY = Library("timm", resize, write, read, example, companions, call)
