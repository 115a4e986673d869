"""The sites of an nn.MultiheadAttention anywhere in a model, recognised by its exact class."""

from __future__ import annotations

from typing import Any

from torch import nn

from corp.sites import AttentionSite, Finding, Refusal, Rows, ValueSite
from corp.surgery.multihead import NarrowMultihead

KNOWN = (nn.MultiheadAttention, NarrowMultihead)


def multihead(name: str, module: Any) -> list[Finding]:
    """The sites of an nn.MultiheadAttention; each call says whether it is causal and which keys are padding."""
    down = f"{name}.out_proj" if name else "out_proj"
    if problem := _unusual(module):
        return [Refusal(name, "attn", problem), Refusal(down, "vo", problem)]
    values: int = module.num_heads * module.head_dim
    width = (len(module.in_proj_weight) - values) // 2
    bounds = ((0, width), (width, 2 * width), (2 * width, 2 * width + values))
    q, k, v = (Rows(name, *bound, weight="in_proj_weight", bias="in_proj_bias") for bound in bounds)
    return [
        AttentionSite(name, q, k, module.num_heads, NarrowMultihead, causal=None),
        ValueSite(down, v, module.num_heads, down, name, NarrowMultihead),
    ]


def _unusual(module: Any) -> str | None:
    if type(module) is NarrowMultihead:
        return None
    if module.in_proj_weight is None:
        return "keys or values of another width than the queries (kdim, vdim) have projections of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return "extra keys (add_bias_kv, add_zero_attn) are not understood"
    if type(module.out_proj) is not nn.modules.linear.NonDynamicallyQuantizableLinear:
        return f"out_proj is a {type(module.out_proj).__module__}.{type(module.out_proj).__name__}"
    return None
