"""A model in a folder, opened without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from corp.adapters.shell import emptied
from corp.errors import ModelError
from corp.io.files import read_json
from corp.storage.streamed.presence import Presence
from corp.storage.streamed.weights import Place, Weights, contents, matched
from corp.storage.tying import tied_names
from corp.surgery.opened import opened

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def open_folder(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Presence:
    """The model of a folder that transformers' save_pretrained or timm wrote; no weights are read.

    It computes on `device`, in `dtype` or that of the checkpoint.
    """
    path = Path(folder)
    held = contents(_files(path))
    problem: ModelError | None = None
    for model, names, known in _shells(path, list(held)):
        try:
            places = matched(model, names, held, path)
        except ModelError as error:
            problem = problem or error
            continue
        if problem is not None and len(places) < len(held):  # a bare backbone, but the weights hold more than that
            break
        _require_plain(model, path)
        kind = dtype or known or _dtype_of(next(iter(held.values())))
        home = torch.device(device)
        return Presence(emptied(model, kind, home), Weights(places, kind, home))
    raise problem or ModelError(f"{path} names no model")


def _shells(folder: Path, keys: list[str]) -> Iterator[tuple[nn.Module, dict[str, str], torch.dtype | None]]:
    """The model as every class it may be, where each of its tensors is among `keys`, and the dtype on record."""
    config = read_json(folder / "config.json")
    if isinstance(config, dict) and "architecture" in config and "model_type" not in config:
        from corp.adapters import timm_models  # imported only when one of its models is asked for

        yield timm_models.shell(folder), {key: key for key in keys}, None
        return
    from corp.adapters import hf_models

    for model, dtype in hf_models.shells(str(folder)):
        yield model, hf_models.tensor_names(model, keys), dtype


def _files(folder: Path) -> list[Path]:
    """The weights' files: those of the index, the one file, or all."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no folder with a config.json: models are streamed from one, not by name")
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = set(index.get("weight_map", {}).values()) if isinstance(index, dict) else set()
        return [folder / Path(str(name)).name for name in names]
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else list(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder} holds no weights as safetensors, which is what can be streamed")
    return found


def _dtype_of(place: Place) -> torch.dtype:
    with safe_open(place.file, framework="pt") as file:
        found: torch.dtype = file.get_tensor(place.key).dtype
    return found if found.is_floating_point else torch.float32


def _require_plain(model: nn.Module, folder: Path) -> None:
    """Refuse what cannot be taken block by block: maps that are no layers of their own, layers used twice."""
    if opened(model) is not model:
        raise ModelError(f"{folder}: {type(model).__name__} packs experts or biases in a way that cannot be streamed")
    tied = tied_names(model)
    in_blocks = [name for name in tied if any(part.isdigit() for part in name.split("."))]
    if in_blocks:
        raise ModelError(f"{folder}: {in_blocks[0]} is {tied[in_blocks[0]]} as well, so blocks cannot be streamed")
