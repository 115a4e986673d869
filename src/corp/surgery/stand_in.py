"""Stand-ins for blocks of a copied model: they have the attributes that the model reads, but do not run the block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import nn

from corp.calibration.hooks import input_of


def stand_in(block: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """A module like the block, including hooks, that calls `call` with its arguments instead of running."""

    def forward(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    made = copy.copy(block)
    made.__dict__.pop("forward", None)  # a wrapper's
    made.__class__ = type(type(block).__name__, (type(block),), {"forward": forward})
    return made


def replace_block(model: nn.Module, name: str, call: Callable[..., Any]) -> None:
    """Put a stand-in into the model, in place."""
    model.set_submodule(name, stand_in(model.get_submodule(name), call))


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the model that shares all its tensors."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)  # tensors in the memo are not copied


def idle_copy(model: nn.Module, blocks: Iterable[str]) -> nn.Module:
    """A copy that shares the model's tensors, and in which these blocks return their hidden state unchanged."""
    idle = sharing_copy(model)
    for name in blocks:
        replace_block(idle, name, lambda *args, **kwargs: input_of(args, kwargs))
    return idle
