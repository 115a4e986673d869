"""Models in open form: all their linear maps are linear layers that are called, as calibration and surgery need.

Some libraries store a map in other forms: experts packed in one parameter, or a layer's bias separate from it. A model
is opened as a copy that shares its memory and computes the same; the user's own model is never changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from corp.surgery.experts import opens, unpack
from corp.surgery.stand_in import sharing_copy

# Classes that call `qkv` if there is no `q_bias`, and otherwise use its weight with three concatenated biases.
SPLIT_BIASES = {
    ("timm.models.beit", "Attention"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.swin_transformer_v2", "WindowAttention"),
}


def opened(model: nn.Module) -> nn.Module:
    """The model in its open form, sharing all memory except joined biases; the model itself if it is open already."""
    if not any(opens(module) or _is_split(module) for module in model.modules()):
        return model
    apart = sharing_copy(model)
    open_up(apart)
    return apart


def open_up(model: nn.Module) -> None:
    """Bring a model into its open form, in place. Packed experts can be packed again; joined biases stay joined."""
    unpack(model)
    for module in model.modules():
        if _is_split(module):
            _join(module)


def _is_split(module: Any) -> bool:
    known = (type(module).__module__, type(module).__name__) in SPLIT_BIASES
    return known and module.q_bias is not None and isinstance(module.qkv, nn.Linear)


def _join(attention: Any) -> None:
    parts = [attention.q_bias, attention.k_bias, attention.v_bias]
    joined = nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features, joined.out_features = attention.qkv.in_features, attention.qkv.out_features
    joined.weight = attention.qkv.weight
    whole = torch.cat([part.detach().to(joined.weight.device) for part in parts])  # a buffer may be on another device
    joined.bias = nn.Parameter(whole, requires_grad=parts[0].requires_grad)
    attention.qkv = joined.train(attention.training)
    attention.q_bias = attention.v_bias = None
