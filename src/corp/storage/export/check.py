"""The verification of an export: the files are read by their own library and compared with the pruned model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, move, run
from corp.errors import StorageError

# Of the largest output. Padded kernels round differently; a wrong weight is off by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def precise(model: nn.Module) -> torch.dtype:
    """The dtype to compare in: half precision would hide a difference behind its rounding."""
    dtype = next(model.parameters()).dtype
    return dtype if dtype in (torch.float64, torch.float32) else torch.float32


def on_cpu(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in this dtype: itself if it is there already, otherwise a copy."""
    if all(p.dtype == dtype and p.device.type == "cpu" for p in model.parameters() if p.is_floating_point()):
        return model
    return copy.deepcopy(model).to("cpu", dtype)


def largest_difference(model: nn.Module, reread: nn.Module, batch: Any) -> float:
    """The largest difference of the outputs, relative to the largest output; both run on the CPU, in `precise`."""
    dtype = precise(model)
    model, reread = on_cpu(model, dtype), reread.to("cpu", dtype)
    _same_rounding(model, reread)
    batch = move(batch, torch.device("cpu"), dtype)
    return apart(outputs(model, batch), outputs(reread, batch))


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference between outputs of the same name, each relative to its largest value."""
    if ours.keys() != theirs.keys() or not ours:
        raise StorageError(f"the pruned model returns {sorted(ours)}, the exported one {sorted(theirs)}")
    worst = 0.0
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise StorageError(
                f"{name} of the exported model is {tuple(theirs[name].shape)}, not {tuple(tensor.shape)}"
            )
        distance = float((tensor - theirs[name]).abs().max()) / max(float(tensor.abs().max()), 1e-30)
        worst = max(worst, distance if math.isfinite(distance) else math.inf)
    return worst


def require_agreement(difference: float, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    if not difference <= limit:
        raise StorageError(
            f"the exported model disagrees with the pruned one: by {difference:.2g} of the largest output, "
            f"more than {limit:g}; nothing was written. The compact profile holds the model exactly"
        )


def _same_rounding(model: nn.Module, reread: nn.Module) -> None:
    """Copy constants that are computed and not saved, because a cast may have rounded them in one of the models."""
    computed = dict(model.named_buffers())
    for name, buffer in reread.named_buffers():
        ours = computed.get(name)
        if ours is not None and ours.shape == buffer.shape and torch.allclose(ours.to(buffer), buffer, rtol=1e-2):
            buffer.copy_(ours)


def outputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The floating-point tensors that a model returns for a batch, by name."""
    try:
        with evaluating(model), torch.no_grad():
            made = run(model, batch)
    except Exception as error:  # the model's own error about the inputs
        raise StorageError(f"the export cannot be checked, {type(model).__name__} does not run: {error}") from error
    return named(made)


def named(made: Any) -> dict[str, Tensor]:
    """A model's output as floating-point tensors by name; a single tensor is called output."""
    if isinstance(made, Tensor):
        return {"output": made}
    entries = made if isinstance(made, Mapping) else dict(enumerate(made))
    return {
        str(key): value for key, value in entries.items() if isinstance(value, Tensor) and value.is_floating_point()
    }
