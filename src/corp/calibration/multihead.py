"""The queries, keys and averaged values of nn.MultiheadAttention, which calls none of its layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp.calibration.masks import real
from corp.errors import StatisticsError
from corp.sites import Rows


def averages(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The averaged values of a call of nn.MultiheadAttention, which does not call its output projection.

    A shallow copy with the identity as its output projection is run on the same arguments."""
    projection, twin = module.out_proj, copy.copy(module)
    twin._modules = {**module._modules, "out_proj": _identity(projection.in_features, like=projection.weight)}
    z: Tensor = twin.forward(*args, **kwargs)[0]  # forward, not a call: other hooks saw this input already
    return z


def _identity(width: int, like: Tensor) -> nn.Linear:
    linear = nn.Linear(width, width, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.eye(width, dtype=like.dtype, device=like.device), requires_grad=False)
    return linear


def padding(name: str, call: dict[str, Any], keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Which queries and which keys (B, m, ...) of a call of nn.MultiheadAttention are real."""
    k_mask = real(call.get("key_padding_mask"), keys.shape[:2], marks_padding=True, what=name)
    return k_mask if call["query"] is call["key"] else None, k_mask


def is_causal(call: dict[str, Any], queries: int, keys: int) -> bool:
    """Whether a call of nn.MultiheadAttention hides exactly the future."""
    mask = call.get("attn_mask")
    if queries != keys or queries == 1 or not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    return torch.equal(hidden, torch.ones_like(hidden).triu(1))


def project(module: nn.Module, rows: Rows, x: Tensor) -> Tensor:
    if getattr(module, rows.weight).is_meta:
        raise StatisticsError("nn.MultiheadAttention cannot be calibrated with offloaded weights; load the model whole")
    bias = getattr(module, rows.bias)
    part = slice(rows.start, rows.stop)
    return F.linear(x, getattr(module, rows.weight)[part], None if bias is None else bias[part])
