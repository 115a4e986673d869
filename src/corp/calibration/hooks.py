"""Helpers for hooks: removing them, turning off what would bypass them, and finding the block of a layer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from corp.calibration.threads import shared

NUMBERED = re.compile(r"\d+|[a-z_]*(?:layer|block)s?_?\d+")  # names of repeated blocks


def without_fast_path() -> AbstractContextManager[None]:
    """Make torch.nn's layers call their parts one by one, as hooks require."""

    def change() -> Callable[[], None]:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return lambda: torch.backends.mha.set_fastpath_enabled(fast)

    return shared({"fast path": change})


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turn off autocast, so that products are as precise as their factors: it is meant for the model, not for sums."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled models uncompiled: compiling them with corp's hooks would take minutes, for a single pass."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing was compiled, and setting the stance would import the compiler: two seconds

    def change() -> Callable[[], None]:
        stance = ExitStack()
        stance.enter_context(torch.compiler.set_stance("force_eager"))
        return stance.close

    return shared({"stance": change})


@contextmanager
def removing(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end. Until then compiled models run uncompiled, so that hooks are called."""
    try:
        with uncompiled():
            yield
    finally:
        for handle in handles:
            handle.remove()


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input of a layer's call, passed by position or by name."""
    return args[0] if args else next(iter(kwargs.values()))


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with its input replaced by `x`."""
    return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): x})


def modules_around(name: str) -> list[str]:
    """The modules that contain the one called `name`, innermost first and the model, "", last."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]


def block_of(layer: str) -> str | None:
    """The innermost numbered module around a layer ("blocks.3" of "blocks.3.mlp.fc2") that is not an expert."""
    parts = layer.split(".")
    numbered = (i for i, part in enumerate(parts[:-1]) if NUMBERED.fullmatch(part) and parts[i - 1] != "experts")
    depth = max(numbered, default=None)
    return None if depth is None else ".".join(parts[: depth + 1])
