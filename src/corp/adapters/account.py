"""An account of every layer of a model: pruned, refused with the reason, or outside the scope of pruning."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from corp.adapters.linears import in_block, is_linear
from corp.adapters.scope import lone_blocks
from corp.sites import Layer, Refusal, Site, layers_of, module_of

SMALL = 4096  # parameters up to which a matrix in a block needs no reason


def account(model: nn.Module, sites: Sequence[Site], refused: Sequence[Refusal]) -> tuple[Layer, ...]:
    """One entry for every module with its own parameters."""
    pruned = {name for site in sites for name in layers_of(site)}
    attentions = [module_of(site) for site in sites if site.kind != "mlp"]
    attentions += [refusal.name for refusal in refused if refusal.kind == "attn"]
    blocks = tuple(filter(None, lone_blocks(attentions)))  # a whole model is not a block: it has a head
    found = []
    for name, module in model.named_modules():
        params = sum(p.numel() for p in module.parameters(recurse=False))
        if params:
            found.append(Layer(name, params, *_state(name, module, params, pruned, refused, blocks)))
    return tuple(found)


def _state(
    name: str, module: nn.Module, params: int, pruned: set[str], refused: Sequence[Refusal], blocks: tuple[str, ...]
) -> tuple[str, str]:
    if name in pruned:
        return "pruned", ""
    matrix = any(p.dim() > 1 for p in module.parameters(recurse=False))
    reason = next((r.reason for r in refused if name == r.name or name.startswith(f"{r.name}.")), None)
    if not matrix or (reason is None and not _inside(name, module, blocks)):
        return "outside", "outside of the repeated blocks" if matrix else "no matrix"
    if reason is not None:
        return "refused", reason
    if params <= SMALL:
        return "outside", "small"
    return "refused", f"{type(module).__name__} is part of no MLP or attention that was recognised"


def _inside(name: str, module: nn.Module, blocks: tuple[str, ...]) -> bool:
    """Whether a layer is in a block; a numbered module with its own parameters is a block."""
    if in_block(name) or (is_linear(module) and name.startswith(blocks)):
        return True
    return not type(module).__module__.startswith("torch.nn") and in_block(f"{name}.x")
