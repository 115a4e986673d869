"""A model in a folder, opened without its weights: a block's weights are loaded only while it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from corp.adapters.shell import emptied
from corp.calibration.hooks import block_of, removing
from corp.calibration.threads import here
from corp.errors import ModelError
from corp.io.files import read_json
from corp.storage.streamed.weights import Place, Weights, contents, matched
from corp.storage.tying import tied_names
from corp.surgery.opened import opened

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Presence:
    """A model of placeholders and the location of its weights. A unit is a numbered module with its own parameters."""

    def __init__(self, model: nn.Module, weights: Weights, blocks: Collection[str] | None = None) -> None:
        """`blocks` are the modules that are units; by default all that qualify."""
        self.model, self.weights = model, weights
        self.tied = tied_names(model)
        self.units: dict[str, list[str]] = {}
        self.resident: list[str] = []
        for name, _ in model.named_parameters():
            unit = self._unit_of(name) if blocks is None else _around(name, blocks)
            self.resident.append(name) if unit is None else self.units.setdefault(unit, []).append(name)
        self._empty = {name: parameter for names in self.units.values() for name, parameter in self.of(names)}

    def _unit_of(self, name: str) -> str | None:
        """The numbered module around a parameter's layer, or that layer if it is numbered and has layers inside."""
        owner = name.rpartition(".")[0]
        has_layers = any(True for _ in self.model.get_submodule(owner).children())
        return block_of(f"{owner}." if has_layers else owner)

    def of(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        """These parameters, as currently in the model."""
        return ((name, self.model.get_parameter(name)) for name in names)

    def load_resident(self) -> None:
        """Load what is not part of a unit, and saved buffers."""
        self._fill(self.resident)
        self.load_buffers()
        for name, first in self.tied.items():
            self._put(name, self.model.get_parameter(first))

    def load_buffers(self) -> None:
        """Load all buffers that are saved with the weights."""
        for name in dict(self.model.named_buffers()):
            if name in self.weights.places:
                owner, _, attribute = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[attribute] = self.weights.read([name])[name]

    def keep_only(self, blocks: Sequence[str]) -> None:
        """From now on only these modules are units; everything outside them stays in memory."""
        for unit in [unit for unit in self.units if unit not in blocks]:
            names = self.units.pop(unit)
            if (home := _around(names[0], blocks)) is not None:
                self.units.setdefault(home, []).extend(names)
                continue
            self.resident += names
            self._fill(names)

    @contextmanager
    def held(self, unit: str) -> Iterator[None]:
        """Within this context, the unit's weights are loaded."""
        names = self.units.get(unit, [])
        self._fill(names)
        try:
            yield
        finally:
            self._clear(names)

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Within this context, the weights of every unit are loaded when it is called and released afterwards."""

        def watch(unit: str, names: list[str]) -> Iterator[Any]:
            module = self.model.get_submodule(unit)
            yield module.register_forward_pre_hook(here(lambda _m, _a: self._fill(names)), prepend=True)
            yield module.register_forward_hook(here(lambda _m, _a, _o: self._clear(names)), always_call=True)

        with removing([handle for unit, names in self.units.items() for handle in watch(unit, names)]):
            yield

    def _fill(self, names: Sequence[str]) -> None:
        for name, tensor in self.weights.each(names):
            self._put(name, nn.Parameter(tensor, requires_grad=False))

    def _clear(self, names: Sequence[str]) -> None:
        for name in names:
            self._put(name, self._empty[name])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, attribute = name.rpartition(".")
        self.model.get_submodule(owner)._parameters[attribute] = parameter


def _around(name: str, blocks: Collection[str]) -> str | None:
    """The innermost of these modules that contains the parameter."""
    return max((block for block in blocks if name.startswith(f"{block}.")), key=len, default=None)


def open_folder(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Presence:
    """The model of a folder written by transformers' save_pretrained or timm; no weights are read.

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
        if problem is not None and len(places) < len(held):  # a bare backbone, but there are weights beyond it
            break
        _require_plain(model, path)
        kind = dtype or known or _dtype_of(next(iter(held.values())))
        home = torch.device(device)
        return Presence(emptied(model, kind, home), Weights(places, kind, home))
    raise problem or ModelError(f"{path} does not name a model")


def _shells(folder: Path, keys: list[str]) -> Iterator[tuple[nn.Module, dict[str, str], torch.dtype | None]]:
    """The model in every possible class, the key of each of its tensors among `keys`, and the recorded dtype."""
    config = read_json(folder / "config.json")
    if isinstance(config, dict) and "architecture" in config and "model_type" not in config:
        from corp.adapters import timm_models  # imported only if one of its models is needed

        yield timm_models.shell(folder), {key: key for key in keys}, None
        return
    from corp.adapters import hf_models

    for model, dtype in hf_models.shells(str(folder)):
        yield model, hf_models.tensor_names(model, keys), dtype


def _files(folder: Path) -> list[Path]:
    """The files of the weights: those of the index, the single file, or all."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a folder with a config.json; models are streamed from a folder, not by name")
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = set(index.get("weight_map", {}).values()) if isinstance(index, dict) else set()
        return [folder / Path(str(name)).name for name in names]
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else list(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder} has no weights as safetensors; other formats cannot be streamed")
    return found


def _dtype_of(place: Place) -> torch.dtype:
    with safe_open(place.file, framework="pt") as file:
        found: torch.dtype = file.get_tensor(place.key).dtype
    return found if found.is_floating_point else torch.float32


def _require_plain(model: nn.Module, folder: Path) -> None:
    """Refuse what cannot be processed block by block: maps that are not separate layers, layers used twice."""
    if opened(model) is not model:
        raise ModelError(f"{folder}: {type(model).__name__} packs experts or biases in a way that cannot be streamed")
    tied = tied_names(model)
    in_blocks = [name for name in tied if any(part.isdigit() for part in name.split("."))]
    if in_blocks:
        raise ModelError(f"{folder}: {in_blocks[0]} is tied to {tied[in_blocks[0]]}, so blocks cannot be streamed")
