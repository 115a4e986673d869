"""Layers that a site does not have to itself: other sites use them, or functions that hold the model's modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn

from corp.sites import Site, layers_of, module_of

Reasons: TypeAlias = dict[tuple[str, str], str]  # by name and kind of a site


def why_shared(model: nn.Module, sites: Sequence[Site]) -> Reasons:
    """Why sites are refused whose layers are used elsewhere: what one user prunes, the other would lose."""
    return {**_by_sites(model, sites), **_by_functions(model, sites)}


def _by_sites(model: nn.Module, sites: Sequence[Site]) -> Reasons:
    """Sites of different modules that use one layer.

    Blocks with the same weights throughout (Zamba) would need more memory if every one of them got its own.
    """
    users: dict[tuple[str, Any], list[Site]] = {}
    for site in sites:
        layers = [model.get_submodule(name) for name in layers_of(site)]
        weights = [id(p) for layer in layers for p in layer.parameters(recurse=False) if p.dim() > 1]
        for shared in ("all its weights", frozenset(weights)), *(("a layer", id(layer)) for layer in layers):
            users.setdefault(shared, []).append(site)
    return {
        (site.name, site.kind): f"it shares {what} with {other.name}"
        for (what, _), several in users.items()
        for site in several
        for other in several
        if module_of(other) != module_of(site)
    }


def _by_functions(model: nn.Module, sites: Sequence[Site]) -> Reasons:
    """Sites in modules that a function holds (minGPT's `mlpf`): a copy of the model calls the original's modules."""
    reasons: Reasons = {}
    for function, held in _held_by_functions(model):
        prefix = f"{held}." if held else ""
        reason = f"{function} is a function that holds {held or 'the model'}, also in a copy; make it a method instead"
        inside = [site for site in sites if any(f"{name}.".startswith(prefix) for name in layers_of(site))]
        reasons |= {(site.name, site.kind): reason for site in inside}
    return reasons


def _held_by_functions(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(function, module) for every module of the model in the closure of a function that is an attribute of one."""
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            cells = value.__closure__ or () if isinstance(value, FunctionType) and _may_run(attribute) else ()
            held = [names[id(cell.cell_contents)] for cell in cells if _holds(cell, names)]
            yield from ((f"{name}.{attribute}" if name else attribute, one) for one in held)


def _may_run(attribute: str) -> bool:
    """Whether a forward pass may call an attribute: not `to` or `cuda`, which accelerate wraps."""
    return attribute == "forward" or not hasattr(nn.Module, attribute)


def _holds(cell: Any, names: dict[int, str]) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module) and id(cell.cell_contents) in names
    except ValueError:  # an empty cell
        return False
