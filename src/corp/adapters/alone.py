"""Modules of a model tested alone, on random tokens, if no input of the whole model has verified them.

A custom model does not describe its inputs, but its attentions and MLPs often take only a sequence. Only successful
tests count: a module that its model calls in another way may fail here for other reasons.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from corp.adapters.linears import in_features, is_linear
from corp.adapters.structure import Claim
from corp.adapters.verify import verify
from corp.calibration.batches import placement
from corp.calibration.hooks import block_of
from corp.sites import Refusal, Site, is_pointwise, layers_of

SHAPE = (3, 7)  # samples and tokens
MOST_TOKENS = 256  # of a window
# Arguments besides the sequence that a module may have, and that change nothing if they are not given.
_HARMLESS = re.compile(r"mask|return|need|output|causal|cache|past|drop|train", re.IGNORECASE)


@dataclass
class Found:
    """Sites in the order of the model, what was refused, and the names of verified sites."""

    sites: list[Site] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)


def try_alone(model: nn.Module, claims: list[Claim], fixed: list[Site], found: Found) -> tuple[list[Claim], list[Site]]:
    """Verify sites in modules that run alone, then in such blocks; returns the remaining claims and sites."""
    failed: set[type] = set()
    homes = dict.fromkeys([*(claim.parts.name for claim in claims), *map(home_of, fixed)])
    for home in (*homes, *dict.fromkeys(filter(None, map(block_of, homes)))):
        module, prefix = model.get_submodule(home), f"{home}." if home else ""
        if type(module) in failed or not takes_tokens(module):
            continue
        inside = (
            [claim for claim in claims if f"{claim.parts.name}.".startswith(prefix)],
            [site for site in fixed if f"{home_of(site)}.".startswith(prefix)],
        )
        proven = _proven(model, module, *inside)
        if not proven and any(inside):
            failed.add(type(module))
        found.sites += proven
        found.proven |= {site.name for site in proven}
        places = {(site.name, site.kind) for site in proven}
        claims = [left for claim in claims if (left := without(claim, places)).qk or left.vo]
        fixed = [site for site in fixed if (site.name, site.kind) not in places]
    return claims, fixed


def home_of(site: Site) -> str:
    """The smallest module that contains all layers of a site."""
    homes = [name.split(".")[:-1] for name in layers_of(site)]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*homes, strict=False))
    return ".".join(parts[0] for parts in same)


def takes_tokens(module: Any) -> bool:
    """Whether a module's forward takes one tensor, and otherwise only arguments that are optional or may be None."""
    taken = list(inspect.signature(module.forward).parameters.values())
    if not taken or taken[0].default is not taken[0].empty or taken[0].kind is taken[0].VAR_POSITIONAL:
        return False
    return all(_HARMLESS.search(p.name) for p in taken[1:])


def _nothing_else(module: Any) -> dict[str, None]:
    """None for every required argument besides the sequence."""
    taken = list(inspect.signature(module.forward).parameters.values())[1:]
    return {p.name: None for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


def _proven(model: nn.Module, module: nn.Module, claims: Sequence[Claim], fixed: Sequence[Site]) -> list[Site]:
    """The sites that are verified while the module runs alone."""
    if not claims and not fixed:
        return []
    first = next(layer for layer in module.modules() if is_linear(layer) or is_pointwise(layer))
    device, dtype = placement(module)
    shapes = [(SHAPE[0], n, in_features(first)) for n in lengths(module)] if is_linear(first) else [_positions(first)]
    for shape in shapes:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        try:
            outcome = verify(model, partial(module, x, **_nothing_else(module)), claims, fixed, packed=True)
        except Exception:  # it takes something else: undecided
            continue
        return [site for site in outcome.sites if site.name in outcome.proven]
    return []


def lengths(module: nn.Module) -> list[int]:
    """How many tokens a module may take: any number, or as many as a table in it has for every pair of them.

    Attention in windows has such a table (an index of relative positions, a mask) as a buffer or a parameter.
    """
    tables = [*module.buffers(), *module.parameters()]
    square = [table.shape[-1] for table in tables if table.dim() > 1 and table.shape[-1] == table.shape[-2]]
    return list(dict.fromkeys([SHAPE[1], *(n for n in square if n <= MOST_TOKENS)]))


def _positions(first: Any) -> tuple[int, ...]:
    """The spatial shape of a small input for a convolution."""
    samples, side = SHAPE
    return samples, in_features(first), *(side for _ in first.kernel_size)


def without(claim: Claim, places: set[tuple[str, str]]) -> Claim:
    """The claim without the sites at these places, which have a name and a kind each."""
    qk = tuple(site for site in claim.qk if (site.name, site.kind) not in places)
    vo = tuple(site for site in claim.vo if (site.name, site.kind) not in places)
    return replace(claim, qk=qk, vo=vo)
