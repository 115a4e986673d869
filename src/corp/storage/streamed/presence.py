"""Weights that are there when they are needed: those of a block while it runs or is worked on, the others always."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from corp.calibration.hooks import block_of, removing
from corp.calibration.threads import here
from corp.storage.streamed.weights import Weights
from corp.storage.tying import tied_names


class Presence:
    """A model of placeholders and where its weights lie. A unit is a numbered module with parameters of its own."""

    def __init__(self, model: nn.Module, weights: Weights, blocks: Collection[str] | None = None) -> None:
        """`blocks` are the modules that are units; by default all that can be."""
        self.model, self.weights = model, weights
        self.tied = tied_names(model)
        self.units: dict[str, list[str]] = {}
        self.resident: list[str] = []
        for name, _ in model.named_parameters():
            unit = self._unit_of(name) if blocks is None else _around(name, blocks)
            self.resident.append(name) if unit is None else self.units.setdefault(unit, []).append(name)
        self._empty = {name: parameter for names in self.units.values() for name, parameter in self.of(names)}

    def _unit_of(self, name: str) -> str | None:
        """The numbered module around the layer of a parameter, or the layer itself if it is one with layers inside."""
        owner = name.rpartition(".")[0]
        has_layers = any(True for _ in self.model.get_submodule(owner).children())
        return block_of(f"{owner}." if has_layers else owner)

    def of(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        """These parameters as they stand in the model now."""
        return ((name, self.model.get_parameter(name)) for name in names)

    def load_resident(self) -> None:
        """Bring in what is no part of a unit, and saved buffers."""
        self._fill(self.resident)
        self.load_buffers()
        for name, first in self.tied.items():
            self._put(name, self.model.get_parameter(first))

    def load_buffers(self) -> None:
        """Bring in all buffers that are saved with the weights."""
        for name in dict(self.model.named_buffers()):
            if name in self.weights.places:
                owner, _, attribute = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[attribute] = self.weights.read([name])[name]

    def keep_only(self, blocks: Sequence[str]) -> None:
        """From now on only these modules are units; what is outside of them stays in memory."""
        for unit in [unit for unit in self.units if unit not in blocks]:
            names = self.units.pop(unit)
            if (home := _around(names[0], blocks)) is not None:
                self.units.setdefault(home, []).extend(names)
                continue
            self.resident += names
            self._fill(names)

    @contextmanager
    def held(self, unit: str) -> Iterator[None]:
        """Inside, the unit's weights are there."""
        names = self.units.get(unit, [])
        self._fill(names)
        try:
            yield
        finally:
            self._clear(names)

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Inside, the weights of every unit come when it is called, and go when it is done."""

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
    """The innermost of these modules that holds the parameter."""
    return max((block for block in blocks if name.startswith(f"{block}.")), key=len, default=None)
