"""A model as one traced graph with free batch and sequence axes: what ONNX and PT2 files are made of.

Nothing here knows a library: inputs are tensors or named tensors, outputs become a tensor or named tensors.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from corp.calibration.batches import evaluating, inputs_of
from corp.errors import StorageError
from corp.storage.export.check import named

INPUT = "input"  # what the input of a model that takes a lone tensor is called
MASK, IDS, TYPES = "attention_mask", "input_ids", "token_type_ids"
SEQUENCES = (IDS, MASK, TYPES, "decoder_input_ids", "encoder_hidden_states")  # whose second axis is the sequence
TRACED = 2  # samples: one would be taken for a constant
BATCH, SEQUENCE = "batch", "sequence"

Inputs = dict[str, Tensor]


class Graph(nn.Module):
    """`model` with plain inputs and outputs, so that a file made of it needs neither its library nor a cache."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        lone = names == [INPUT]
        # Keys and values of earlier tokens are state; a graph has none.
        fixed = {"use_cache": False} if "use_cache" in _parameters(model) else {}

        def forward(*args: Tensor, **inputs: Tensor) -> Any:
            inputs = {**dict(zip(names, args, strict=False)), **inputs}
            made = model(inputs[INPUT]) if lone else model(**inputs, **fixed)
            return made if isinstance(made, Tensor) else named(made)

        # torch reads the names of the inputs, and of what a file of the graph takes, off the signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        self.forward = forward


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def inputs_for(model: nn.Module, batch: Any) -> Inputs:
    """The inputs by name, with the masks of the texts among them, for as many samples as tracing needs."""
    batch = inputs_of(batch)
    inputs = dict(batch) if isinstance(batch, Mapping) else {INPUT: batch}
    if not inputs or not all(isinstance(value, Tensor) and value.dim() for value in inputs.values()):
        raise StorageError(f"a graph takes a tensor or named tensors, not {type(batch).__name__}")
    takes = _parameters(model)
    if IDS in inputs and MASK in takes:
        inputs.setdefault(MASK, torch.ones_like(inputs[IDS]))
    if IDS in inputs and TYPES in takes and getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1:
        inputs.setdefault(TYPES, torch.zeros_like(inputs[IDS]))
    return {name: _samples(value, TRACED) for name, value in inputs.items()}


def variants(inputs: Inputs) -> list[Inputs]:
    """What a graph is checked on: other batch sizes and shorter sequences than it was traced with, some padded."""
    found = []
    for samples, share in ((1, 1.0), (TRACED, 1.0), (TRACED + 1, 0.6)):
        made = {name: _samples(value, samples) for name, value in inputs.items()}
        for name in made.keys() & set(SEQUENCES):
            made[name] = made[name][:, : max(2, int(share * made[name].shape[1]))].contiguous()
        if MASK in made and samples > 1:
            made[MASK] = made[MASK].clone()
            made[MASK][0, -1] = 0
        found.append(made)
    return found


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], Inputs]:
    """How a graph is called: with a lone tensor as it is, with others by name."""
    return ((inputs[INPUT],), {}) if list(inputs) == [INPUT] else ((), inputs)


def free_axes(name: str, value: Tensor) -> tuple[int, ...]:
    return (0, 1) if name in SEQUENCES and value.dim() > 1 else (0,)


def trace(model: nn.Module, inputs: Inputs) -> ExportedProgram:
    """The graph of `model` for any batch size and sequence length that it takes."""
    free = {name: dict.fromkeys(free_axes(name, value), Dim.DYNAMIC) for name, value in inputs.items()}
    try:
        with evaluating(model), torch.no_grad(), quiet():
            args, kwargs = arguments(inputs)
            return torch.export.export(Graph(model, list(inputs)), args, kwargs, dynamic_shapes=free)
    except Exception as error:  # of many kinds, and often pages long
        raise StorageError(
            f"torch.export cannot trace {type(model).__name__} with free batch and sequence axes: {first_line(error)}"
        ) from error


def axis_names(program: ExportedProgram, inputs: Inputs) -> dict[str, str]:
    """Symbols of the program's free axes, and what people call them: equal ones have one name."""
    shapes = [
        node.meta["val"].shape for node in program.graph.nodes if node.name in program.graph_signature.user_inputs
    ]
    found: dict[str, str] = {}
    for (name, value), shape in zip(inputs.items(), shapes, strict=True):
        for axis in free_axes(name, value):
            plain = (BATCH, SEQUENCE)[axis]
            own = plain in found.values() and name not in (MASK, TYPES)  # those go with the texts
            found.setdefault(str(shape[axis]), f"{name}_{plain}" if own else plain)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns of its own future while it traces and writes; users cannot act on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _samples(value: Tensor, count: int) -> Tensor:
    """`count` samples of a batch, over again where it has fewer."""
    return value[torch.arange(count, device=value.device) % len(value)]
