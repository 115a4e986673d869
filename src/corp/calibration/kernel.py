"""Queries and keys as they reach the attention kernel, after any kind of rotation.

The kernel is scaled_dot_product_attention, or the first product of queries and keys in an unfused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from corp.calibration.hooks import removing
from corp.calibration.threads import here
from corp.sites import AttentionSite

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


@dataclass
class Watched:
    """Reports the queries (B, H, n, d), keys (B, K, m, d) and scale of an attention, once per call."""

    site: AttentionSite
    see: Callable[[Tensor, Tensor, float], None]
    done: bool = False

    def look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.done:
            return
        if func is F.scaled_dot_product_attention:
            q, k = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            scale = kwargs.get("scale")
        elif func in PRODUCTS and self._logits(*args[:2]):
            q, k, scale = args[0], args[1].mT, None
        else:
            return
        self.done = True
        self.see(q, k, q.shape[-1] ** -0.5 if scale is None else scale)

    def _logits(self, q: Any, k: Any) -> bool:
        """Whether this is the product of all heads' queries (B, H, n, d) with their keys (B, K, d, m)."""
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.dim() != 4 or k.dim() != 4:
            return False
        heads, width = self.site.heads, self.site.width
        return q.shape[1] == heads and q.shape[3] == k.shape[2] == width and k.shape[1] in (heads, self.site.groups)


class _Watch(TorchFunctionMode):
    """Reports operations to the observers of the module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Watched] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running:
            self.running[-1].look(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def watching_kernel(model: nn.Module, watched: Iterable[Watched]) -> Iterator[None]:
    """Within this context, each of these attentions reports the queries and keys that it passes to the kernel."""
    watch, handles = _Watch(), []
    for one in watched:

        def before(_module: nn.Module, _args: Any, one: Watched = one) -> None:
            watch.running.append(replace(one))

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            watch.running.pop()

        module = model.get_submodule(one.site.attention)
        handles += [
            module.register_forward_pre_hook(here(before)),
            module.register_forward_hook(here(after), always_call=True),
        ]
    with removing(handles), watch if handles else nullcontext():
        yield
