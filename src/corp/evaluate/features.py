"""Representations against the dense model's: the final one and every block's, compared as they are computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.hooks import removing

FINAL = "final"
BLOCK = re.compile(r"(^|\.)(blocks|layers?)\.\d+$")  # of timm, of transformers
Sink = Callable[[str, Tensor], None]


@dataclass
class Likeness:
    """Sums over tokens; the last dimension is channels."""

    tokens: int = 0
    cosines: float = 0.0
    error: float = 0.0
    energy: float = 0.0

    @property
    def cosine(self) -> float:
        """Mean over tokens of the cosine between the model's features and the dense model's."""
        return self.cosines / max(1, self.tokens)

    @property
    def relative_error(self) -> float:
        """Norm of the difference over the norm of the dense features, both over all tokens."""
        return (self.error / self.energy) ** 0.5 if self.energy else float(self.error > 0)

    def add(self, dense: Tensor, other: Tensor) -> None:
        """Add features (..., C) of the same tokens."""
        a, b = _tokens(dense), _tokens(other)  # (N, C)
        # (3, N): one value per token, summed in float64 on the host since not every device has it.
        sums = torch.stack([torch.cosine_similarity(a, b, dim=1), (b - a).square().sum(1), a.square().sum(1)])
        cosines, error, energy = sums.cpu().double().sum(1).tolist()
        self.tokens += len(a)
        self.cosines += cosines
        self.error += error
        self.energy += energy


def _tokens(features: Tensor) -> Tensor:
    return features.detach().flatten(0, -2).to(torch.promote_types(features.dtype, torch.float32))


@dataclass
class Features:
    """How similar the features of every part of a model are to those of the dense one."""

    parts: dict[str, Likeness] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)  # part -> why it cannot be compared

    def add(self, part: str, dense: Tensor | None, other: Tensor) -> None:
        if dense is None:
            self.unlike[part] = "the dense model has none"
        elif dense.shape != other.shape:
            self.unlike[part] = f"shape {tuple(other.shape[1:])}, dense {tuple(dense.shape[1:])}"
        else:
            self.parts.setdefault(part, Likeness()).add(dense, other)


@contextmanager
def tapped(model: nn.Module, sink: Sink) -> Iterator[None]:
    """Within this context, `sink` gets every block's output and the final representation of a forward pass.

    The final representation is that of transformers' base_model, or of the norm that ends timm's forward_features;
    models with neither have none.
    """
    taps = {name: module for name, module in model.named_modules() if BLOCK.search(name)}
    final = (
        model.norm
        if hasattr(model, "forward_features") and hasattr(model, "norm")
        else getattr(model, "base_model", None)
    )
    if isinstance(final, nn.Module):
        taps[FINAL] = final
    with removing([module.register_forward_hook(_hook(name, sink)) for name, module in taps.items()]):
        yield


def _hook(name: str, sink: Sink) -> Callable[[nn.Module, Any, Any], None]:
    """A hook for blocks that return features or (features, extras); anything but a tensor of tokens is ignored."""

    def offer(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output = getattr(output, "last_hidden_state", output)
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.dim() >= 2:
            sink(name, first)

    return offer
