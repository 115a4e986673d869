"""The linear layers of any model, their widths, and whether they can be narrowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from corp.calibration.hooks import NUMBERED
from corp.calibration.threads import has_hooks
from corp.sites import is_pointwise, is_transposed, projection_of
from corp.surgery.linear import what_changes_it, why_not_linear
from corp.surgery.padded import GatherLinear, ScatterLinear


def is_linear(module: object) -> bool:
    """Whether a module is a linear layer, plain or not."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Module) and is_transposed(module))


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer and convolution of one position by name, in the order of registration."""
    return {name: module for name, module in model.named_modules() if is_linear(module) or is_pointwise(module)}


def mixes(module: object) -> bool:
    """Whether a module is a linear layer or a convolution of any kind."""
    return is_linear(module) or isinstance(module, nn.modules.conv._ConvNd)


def in_block(name: str) -> bool:
    """Whether a layer is inside a numbered (repeated) block."""
    return any(NUMBERED.fullmatch(part) for part in name.split(".")[:-1])


def child(parent: nn.Module, path: str) -> nn.Module | None:
    """The module at this path, if there is one."""
    try:
        return parent.get_submodule(path)
    except AttributeError:
        return None


def not_plain(module: nn.Module, *paths: str) -> str | None:
    """Why one of these cannot be narrowed like a linear layer (an adapter on it, quantisation, a parametrisation …)."""
    for path in paths:
        if problem := why_not_linear(child(module, path)):
            return f"{path} {problem}"
    return None


def not_linear(module: Any) -> str | None:
    """Why a layer cannot be narrowed; a subclass of nn.Linear can be if it computes the same as nn.Linear."""
    problem = what_changes_it(module) if is_pointwise(module) else why_not_linear(module)
    if problem and type(module).__module__.startswith(("transformers.", "timm.")) and _acts_linear(module):
        return None
    return problem


def _acts_linear(module: Any) -> bool:
    if not isinstance(module, nn.Linear) or has_hooks(module):
        return False
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not names <= {"weight", "bias"} or isinstance(module, ScatterLinear | GatherLinear):
        return False
    if module.weight.is_meta:
        return True
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(module.weight)
    with torch.no_grad():
        return torch.allclose(module(x), nn.functional.linear(x, module.weight, module.bias), rtol=1e-2, atol=1e-3)


def is_channelwise(module: Any, width: int) -> bool:
    """Whether a module treats each of `width` channels separately, so that its parameters can be sliced with them."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        alone = module.groups == module.in_channels == module.out_channels == width
        return bool(alone and what_changes_it(module) is None)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and what_changes_it(module) is None


def out_features(module: Any) -> int:
    return len(projection_of(module).weight)


def in_features(module: Any) -> int:
    return projection_of(module).weight.shape[1]
