"""Attention whose code does not change: its projections become narrower, and their outputs are padded with zeros.

This works with any attention of any library, because only linear layers are replaced: removed dimensions of queries,
keys and values are zeros, which change no logit and no average. It saves parameters and operations of the projections,
not of the attention itself; corp.surgery.attention has modules that save both, one per calling convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corp.sites import Projection, Rows, rows_of
from corp.surgery.linear import fuse, make_linear


class ScatterLinear(nn.Linear):
    """A linear layer whose outputs are placed at `index` (e,) among `outputs` features; the others are zero.

    The index is saved with the weights: if an attention has several possible layouts, it records the verified one.
    """

    index: Tensor
    outputs: int

    @classmethod
    def of(cls, like: Any, whole: Projection, index: Sequence[int], outputs: int) -> ScatterLinear:
        made: ScatterLinear = _retyped(cls, make_plain(like, whole), index, persistent=True)
        made.outputs = outputs
        return made

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y.new_zeros(*y.shape[:-1], self.outputs).index_copy(-1, self.index, y)

    def is_sound(self) -> bool:
        """Whether every output has its own place; checked for files."""
        apart = self.index.unique().numel() == len(self.weight)
        return apart and int(self.index.min()) >= 0 and int(self.index.max()) < self.outputs

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, outputs={self.outputs}"


class GatherLinear(nn.Linear):
    """A linear layer that uses the features `index` (e,) of its input."""

    index: Tensor

    @classmethod
    def of(cls, like: Any, index: Sequence[int]) -> GatherLinear:
        made: GatherLinear = _retyped(cls, like, index)
        return made

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.index_select(-1, self.index))


def taken(layer: nn.Module, x: Tensor) -> Tensor:
    """The features of its input x that a linear layer multiplies."""
    return x.index_select(-1, layer.index) if isinstance(layer, GatherLinear) else x


def _retyped(cls: Any, plain: Any, index: Sequence[int], *, persistent: bool = False) -> Any:
    """A layer of class `cls` with the parameters of a plain one."""
    made = cls(plain.weight.shape[1], plain.weight.shape[0], bias=plain.bias is not None, device="meta")
    made.weight, made.bias = plain.weight, plain.bias
    made.register_buffer("index", torch.tensor(list(index), device=plain.weight.device), persistent=persistent)
    return made.train(plain.training)


def make_plain(like: Any, whole: Projection) -> nn.Module:
    """An nn.Linear with these parameters in the dtype of `like`, even if that is a Conv1D."""
    flat = nn.Linear(1, 1, device="meta")
    flat.weight = nn.Parameter(like.weight, requires_grad=like.weight.requires_grad)
    return make_linear(flat.train(like.training), *whole)


@dataclass(frozen=True)
class Padded:
    """Where an attention's queries, keys and values are computed, and the layer that consumes their averages."""

    q: Rows
    k: Rows
    v: Rows
    heads: int
    groups: int
    down: str | None

    def replace(self, model: nn.Module, parts: dict[str, Any]) -> None:
        """Put narrower layers in the places of the dense ones; `parts` are the new rows of q, k and v.

        The output projection has been narrowed already.
        """
        for name, layer in self.layers(model, parts).items():
            model.set_submodule(name, layer)
        if "v" in parts and self.down is not None:
            width, kept = self.v.width // self.groups, len(parts["v"].weight) // self.groups
            index = [h * width + j for h in range(self.heads) for j in range(kept)]
            model.set_submodule(self.down, GatherLinear.of(model.get_submodule(self.down), index))

    def layers(self, model: nn.Module, parts: dict[str, Any]) -> dict[str, nn.Module]:
        """The layers, by name, that make the new parts."""
        given = {"q": (self.q, self.heads), "k": (self.k, self.groups), "v": (self.v, self.groups)}
        made: dict[str, nn.Module] = {}
        for module in dict.fromkeys(rows.module for rows, _ in given.values()):
            inside = {letter: one for letter, one in given.items() if one[0].module == module}
            if set(inside) & set(parts):
                made[module] = self._narrow(model, module, inside, parts)
        return made

    def _narrow(self, model: nn.Module, name: str, inside: dict[str, tuple[Rows, int]], parts: dict[str, Any]) -> Any:
        """The layer `name` with the new parts in their dense order, and the position of each row."""
        layer: Any = model.get_submodule(name)
        whole: list[Projection] = []
        index: list[int] = []
        for letter, (rows, heads) in sorted(inside.items(), key=lambda item: item[1][0].start):
            new: Projection = parts.get(letter) or rows_of(model, rows)
            where = rows.positions
            width, kept = rows.width // heads, len(new.weight) // heads
            dims = self._dims(letter, parts, heads, kept)
            index += [where[h * width + j] for h in range(heads) for j in dims[h]]
            whole.append(new)
        outputs = sum(rows.width for rows, _ in inside.values())
        return ScatterLinear.of(layer, fuse(layer.weight, whole), index, outputs)

    def _dims(self, letter: str, parts: dict[str, Any], heads: int, kept: int) -> list[list[int]]:
        """The position of every kept dimension in its head: frequencies keep theirs, others fill the first ones."""
        which = parts.get("kept")
        if letter == "v" or letter not in parts or which is None:
            return [list(range(kept))] * heads
        return [row for row in which.tolist() for _ in range(heads // self.groups)]
