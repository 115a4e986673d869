"""Narrowed weights padded back to their dense shapes, with zeros where something was removed.

Zeros change nothing: a hidden channel whose column in the second linear layer is zero has no effect, nor has a
dimension that is zero in all queries and keys. The positions of narrowed weights are found by pruning, with the same
code, a model whose weights are their own positions; so this file need not know about packing or transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from corp.adapters.registry import find_sites
from corp.errors import StorageError
from corp.planning.plan import Plan
from corp.sites import layers_of, module_of
from corp.surgery.apply import shrink
from corp.surgery.experts import opens


def pad(model: nn.Module, frame: nn.Module, plans: Sequence[Plan]) -> dict[str, Tensor]:
    """The weights of `model`, pruned by the plans, in the shapes of `frame`, on the CPU.

    `frame` is the model before the plans, on the meta device; its modules are replaced on the way. Parameters
    that it has and `model` lacks (biases that were added to it) are zero.
    """
    experts = [f"{name}." for name, module in frame.named_modules() if opens(module)]
    planned = [site.name for plan in plans for site in plan.sites if site.name.startswith(tuple(experts))]
    if packed := next((name for name in planned if experts), None):
        raise StorageError(f"{packed} is a packed expert, which is not padded; use profile='standard' or 'compact'")
    shapes = {name: tensor.shape for name, tensor in frame.state_dict().items()}
    origins = _origins(frame, plans)
    dtype = next(model.parameters()).dtype
    small = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    padded = {}
    for name, shape in shapes.items():
        values = small.get(name)
        if values is None:
            padded[name] = torch.zeros(shape, dtype=dtype)
        elif name in origins:
            whole = values.new_zeros(shape.numel())
            whole[origins[name].flatten()] = values.flatten()
            padded[name] = whole.view(shape)
        else:
            padded[name] = values
    return padded


def _origins(frame: nn.Module, plans: Sequence[Plan]) -> dict[str, Tensor]:
    """For every parameter that the plans narrow, the positions of its elements in the flattened dense one."""
    found: dict[str, Tensor] = {}
    for names in _together(frame, plans):
        steps = [replace(plan, sites=tuple(s for s in plan.sites if s.name in names)) for plan in plans]
        steps = [step for step in steps if step.sites]
        sites = find_sites(frame)
        for module in dict.fromkeys(module for name in names for module in layers_of(sites[name])):
            _number(frame.get_submodule(module))
        for step in steps:
            shrink(frame, find_sites(frame), step)
        found.update({key: tensor for key, tensor in frame.state_dict().items() if not tensor.is_meta})
        frame.to("meta")  # positions take more memory than weights: those of one site at a time
    return found


def _together(frame: nn.Module, plans: Sequence[Plan]) -> list[list[str]]:
    """The names of all planned sites, grouped by module, because a module's sites are narrowed at once."""
    sites = find_sites(frame)
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(site.name for plan in plans for site in plan.sites):
        groups.setdefault(module_of(sites[name]), []).append(name)
    return list(groups.values())


def _number(module: nn.Module) -> None:
    """Give each element of the module's own parameters and buffers its position as its value."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        positions = torch.arange(parameter.numel()).view(parameter.shape)
        setattr(module, name, nn.Parameter(positions, requires_grad=False))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.arange(buffer.numel()).view(buffer.shape))
