"""Hints about rotary positions from the code around an attention: which alternative to try first, not a proof."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

_ROTARY = ("rotary", "rope", "rot_emb", "position_embeddings", "freqs_c")  # in the names that a forward uses
_ROTATES = re.compile(r"rot|rope", re.IGNORECASE)  # in the names of functions and classes
_NEIGHBOURS = re.compile(r"view_as_complex|::\s*2\b|-1,\s*2\s*[\])]")  # pairs as x[..., ::2] or as (..., -1, 2)


def hints_rotation(module: nn.Module) -> bool:
    """Whether an attention's forward uses, or the attention holds, something named after rotary positions."""
    names = names_in(type(module)) | {type(child).__name__.lower() for child in module.children()}
    return any(word in name for name in names for word in _ROTARY)


def rotates_neighbours(module: Any) -> bool:
    """Whether the function or class that rotates queries, in the attention's file, pairs neighbours."""
    beside = sys.modules.get(type(module).__module__)
    if hasattr(beside, "rotate_every_two") or "view_as_complex" in names_in(type(module), beside):
        return True
    if isinstance(halves := getattr(module, "rotate_half", None), bool):  # an attribute of timm's attentions
        return not halves
    if (function := getattr(beside, "rotate_half", None)) is None:
        return any(_NEIGHBOURS.search(_source(one)) for one in _rotating(module, beside))
    try:
        return bool(function(torch.arange(4.0, device="cpu"))[0] == -1)
    except Exception:  # it takes more than one tensor
        return False


def names_in(cls: Any, beside: Any = None) -> set[str]:
    """The names that an attention's forward uses, and those used by rotating functions in its file."""
    functions = [cls.forward, *(f for name, f in vars(beside or cls).items() if _ROTATES.search(name))]
    codes = [code for f in functions if (code := getattr(inspect.unwrap(f), "__code__", None)) is not None]
    return {name for code in codes for part in _nested(code) for name in (*part.co_varnames, *part.co_names)}


def _nested(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of its lambdas and comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _rotating(module: nn.Module, beside: Any) -> list[Any]:
    """Functions and classes named after rotation: in the attention's file, its methods and its children."""
    named = {**vars(beside or object), **vars(type(module))}
    named |= {type(child).__name__: type(child) for child in module.children()}
    return [x for name, x in named.items() if _ROTATES.search(name) and (inspect.isfunction(x) or inspect.isclass(x))]


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # defined at a prompt, or built in
        return ""
