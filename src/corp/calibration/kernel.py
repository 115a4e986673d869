"""Queries and keys as they reach scaled_dot_product_attention: rotated, whoever rotates them and however."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

See = Callable[[Tensor, Tensor, float], None]  # q (B, H, n, d), k (B, K, m, d) and the scale of their logits


class _Watch(TorchFunctionMode):
    """Shows the kernel's calls to whoever watches the module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[See] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.running:
            q, k = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            scale = kwargs.get("scale")
            self.running[-1](q, k, q.shape[-1] ** -0.5 if scale is None else scale)
        return func(*args, **kwargs)


@contextmanager
def watching_kernel(model: nn.Module, sees: dict[str, See]) -> Iterator[None]:
    """While open, each of these attention modules shows the queries and keys that it hands to the kernel."""
    if not sees:
        yield
        return
    watch, handles = _Watch(), []
    for name, see in sees.items():
        module = model.get_submodule(name)

        def before(_module: nn.Module, _args: Any, see: See = see) -> None:
            watch.running.append(see)

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            watch.running.pop()

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
    try:
        with watch:
            yield
    finally:
        for handle in handles:
            handle.remove()
