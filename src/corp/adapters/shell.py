"""Models without their weights: they have all modules and computed buffers, but parameters take no memory.

A placeholder has the shape and dtype of its parameter but a single number in memory, NaN, so that any computation with
it is noticed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from corp.calibration.hooks import removing


@contextmanager
def without_weights() -> Iterator[None]:
    """Within this context, models are built with parameters on the meta device; buffers are computed as usual."""

    def empty(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # a shared one was replaced before
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    with removing([register_module_parameter_registration_hook(empty)]):  # type: ignore[arg-type]
        yield


def placeholder(like: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Parameter:
    """A parameter in the shape of `like` that takes no memory; `dtype` applies to real numbers."""
    kind = dtype if like.is_floating_point() else like.dtype
    fill = float("nan") if kind.is_floating_point else 0
    return nn.Parameter(torch.full((), fill, dtype=kind, device=device).expand(like.shape), requires_grad=False)


def replace_parameters(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Replace the parameters with these ids; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


def emptied(model: nn.Module, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """Replace parameters by placeholders, in place; buffers move to the device, and saved ones get the dtype."""
    replace_parameters(model, {id(p): placeholder(p, dtype, device) for p in model.parameters()})
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                saved = name not in module._non_persistent_buffers_set and buffer.is_floating_point()
                module._buffers[name] = buffer.to(device, dtype if saved else buffer.dtype)
    return model.eval()
