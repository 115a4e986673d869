"""Where the tensors of a model are in safetensors files, and reading some of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corp.errors import ModelError, StorageError
from corp.sites import fingerprint_of
from corp.storage.tying import saved_state, tied_names


@dataclass(frozen=True)
class Place:
    """A tensor's file, its name there, and its shape."""

    file: Path
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The tensors of one model by its own names, tied ones once; real numbers are read as `dtype`."""

    places: Mapping[str, Place]
    dtype: torch.dtype
    device: torch.device

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, in separate memory."""
        return dict(self.each(names))

    def each(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors one by one, so that only one is in memory at a time."""
        for name in names:
            place = self.places[name]
            try:
                with safe_open(place.file, framework="pt") as file:  # mapped: only what is copied is read
                    tensor = file.get_tensor(place.key)
                    kind = self.dtype if tensor.is_floating_point() else tensor.dtype
                    yield name, tensor.to(self.device, kind, copy=True)
            except (SafetensorError, OSError) as error:
                raise StorageError(f"{place.file} cannot be read: {error}") from error

    def fingerprint(self, model: nn.Module) -> str:
        """The fingerprint that sites.fingerprint computes for the model with its weights."""
        return fingerprint_of(self.each(name for name, _ in model.named_parameters()))


def contents(files: Iterable[Path]) -> dict[str, Place]:
    """All tensors of some safetensors files, by their names there."""
    found: dict[str, Place] = {}
    for path in sorted(files):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (no dict)
                    found[key] = Place(path, key, tuple(file.get_slice(key).get_shape()))
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error
    return found


def matched(model: nn.Module, names: Mapping[str, str], held: Mapping[str, Place], where: Path) -> dict[str, Place]:
    """The place of every tensor of the model's state, tied ones once; `names` maps them to keys of `held`."""
    wanted = {name: tuple(tensor.shape) for name, tensor in saved_state(model).items()}
    known = {**{first: names[name] for name, first in tied_names(model).items() if name in names}, **names}
    lost = [name for name in wanted if name not in known]
    odd = [name for name in wanted if name in known and held[known[name]].shape != wanted[name]]
    if lost or odd:
        problem = f"has no {lost[0]} ({len(lost)} such)" if lost else f"has {odd[0]} in another shape"
        raise ModelError(f"{where} {problem}, so its weights cannot be streamed into {type(model).__name__}")
    return {name: held[known[name]] for name in wanted}
