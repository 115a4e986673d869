"""Layers inside a wrapper (LoRA and its kin): they add to what another layer computes, and are no MLP of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from corp.adapters.linears import in_block
from corp.sites import Refusal
from corp.surgery.linear import is_extended, why_not_linear


def inside_wrappers(model: nn.Module, makers: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """The prefixes of what wrappers hold, those that make queries, keys or values of attentions among them."""
    yield from (f"{name}." for name, _ in _extended(model))
    yield from (f"{name}.{path}." if name else f"{path}." for name, paths in makers for path in paths)


def wrapped_mlps(model: nn.Module, attentions: Sequence[str]) -> Iterator[Refusal]:
    """Wrapped layers of blocks that are part of none of these attentions."""
    within = tuple(f"{name}." for name in attentions)
    for name, module in _extended(model):
        if in_block(name) and not name.startswith(within):
            yield Refusal(name, "mlp", f"{name.rpartition('.')[2]} {why_not_linear(module)}")


def _extended(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_extended(module))
