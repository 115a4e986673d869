"""nn.MultiheadAttention and the blocks around it: torch.nn's layers, torchvision's ViT, open_clip's towers."""

from __future__ import annotations

from typing import Any

from torch import nn

from corp.adapters.linears import not_plain
from corp.adapters.multihead import KNOWN, multihead
from corp.adapters.registry import Adapter
from corp.sites import Finding, Mask, MLPSite, Refusal, Rows

PADDING = {nn.TransformerEncoderLayer: "src_key_padding_mask", nn.TransformerDecoderLayer: "tgt_key_padding_mask"}


def find(module: nn.Module) -> list[Finding] | None:
    """The sites of a module of a known class, exactly; a subclass may compute something else."""
    if type(module) in PADDING:
        return _torch_layer(module)
    if type(module) in KNOWN:
        return multihead("", module)
    where = f"{type(module).__module__}.{type(module).__name__}"
    if where == "torchvision.models.vision_transformer.EncoderBlock":
        return [*_attention(module, "self_attention"), _mlp(module, "mlp", "mlp.0", "mlp.3")]
    if where.endswith(".ResidualAttentionBlock") and where.startswith(("open_clip.", "clip.")):
        first = getattr(getattr(module, "attn", None), "batch_first", False)
        return [*_attention(module, "attn"), _mlp(module, "mlp", "mlp.c_fc", "mlp.c_proj", batch_first=bool(first))]
    return None


def _torch_layer(layer: Any) -> list[Finding]:
    padding = Mask("", PADDING[type(layer)], marks_padding=True)
    first: bool = layer.self_attn.batch_first
    names = ["self_attn", *(["multihead_attn"] if hasattr(layer, "multihead_attn") else [])]
    mlp = _mlp(layer, "mlp", "linear1", "linear2", batch_first=first, mask=padding)
    return [*(found for name in names for found in _attention(layer, name)), mlp]


def _attention(block: Any, name: str) -> list[Finding]:
    module = getattr(block, name)
    if type(module) in KNOWN:
        return multihead(name, module)
    return [Refusal(name, "attn", f"{type(module).__module__}.{type(module).__name__} is not understood")]


def _mlp(block: Any, name: str, up: str, down: str, *, batch_first: bool = True, mask: Mask | None = None) -> Finding:
    if problem := not_plain(block, up, down):
        return Refusal(name, "mlp", problem)
    width: int = block.get_submodule(down).in_features
    return MLPSite(name, (Rows(up, 0, width),), down, mask=mask, batch_first=batch_first)


ADAPTER = Adapter("torch", find)
