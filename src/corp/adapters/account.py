"""Every layer of a model accounted for: pruned, refused with the reason, or outside of what pruning means."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from corp.adapters.linears import in_block
from corp.sites import Layer, Refusal, Site, layers_of

SMALL = 4096  # parameters up to which a matrix in a block needs no reason


def account(model: nn.Module, sites: Sequence[Site], refused: Sequence[Refusal]) -> tuple[Layer, ...]:
    """One entry for every module that has parameters of its own."""
    pruned = {name for site in sites for name in layers_of(site)}
    found = []
    for name, module in model.named_modules():
        params = sum(p.numel() for p in module.parameters(recurse=False))
        if params:
            found.append(Layer(name, params, *_state(name, module, params, pruned, refused)))
    return tuple(found)


def _state(name: str, module: nn.Module, params: int, pruned: set[str], refused: Sequence[Refusal]) -> tuple[str, str]:
    if name in pruned:
        return "pruned", ""
    matrix = any(p.dim() > 1 for p in module.parameters(recurse=False))
    if not in_block(name) or not matrix:
        return "outside", "outside of the repeated blocks" if matrix else "no matrix"
    reason = next((r.reason for r in refused if name == r.name or name.startswith(f"{r.name}.")), None)
    if reason is not None:
        return "refused", reason
    if params <= SMALL:
        return "outside", "small"
    return "refused", f"{type(module).__name__} is part of no MLP or attention that was recognised"
