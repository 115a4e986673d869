"""Vision, vision-language and speech models of transformers: ViT, DeiT, DINOv2, CLIP, SigLIP, Whisper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from corp.adapters.hf_layers import MASK, Attention, Family, Layer, Mlp, family
from corp.surgery.hf_names import Names

_PARTS = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"))
_VIT = Names(_PARTS, ("o_proj",), "num_attention_heads", "scaling", "attention_dropout")
_CLIP = Names(_PARTS, ("out_proj",), "num_heads", "scale", "dropout")
_WHISPER = Names(_PARTS, ("out_proj",), "num_heads", "scaling", "dropout")


def _vit(package: str, prefix: str) -> Family:
    """ViTs: images have no padding; the MLP is plain, or gated (SwiGLU) in large DINOv2 models."""
    plain = Mlp("mlp", ("mlp.fc1",), "mlp.fc2", cls=f"{prefix}MLP", mask=None)
    gated = Mlp("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", cls=f"{prefix}SwiGLUFFN", mask=None)
    attention = Attention("attention", f"{prefix}Attention", _VIT, q_mask=None, k_mask=None)
    return family(package, f"{prefix}Layer", attention, plain, gated)


def _clip(package: str, prefix: str) -> Family:
    """Two towers of one layer class: the text tower has a mask, and is causal in CLIP but not in SigLIP."""
    attention = Attention("self_attn", f"{prefix}Attention", _CLIP, causal=_of_clip_text)
    pooling = Attention("attention", "MultiheadAttention", _CLIP, q_mask=None, k_mask=None)
    mlp = Mlp("mlp", ("mlp.fc1",), "mlp.fc2", cls=f"{prefix}MLP")
    layers = {
        f"{prefix}EncoderLayer": Layer((attention,), (mlp,)),
        # SigLIP's pooling: a learned query attends to all patches.
        f"{prefix}MultiheadAttentionPoolingHead": Layer((pooling,), (replace(mlp, mask=None),)),
    }
    return Family(f"{package}.modeling_{package}", layers)


def _of_clip_text(model: Any, _attention: Any) -> bool:
    return type(model).__name__ == "CLIPTextModel"


# Whisper pads with silence: its encoder has no mask, and all tokens that cross-attention sees are real.
WHISPER = Family(
    "whisper.modeling_whisper",
    {
        "WhisperEncoderLayer": Layer(
            (Attention("self_attn", "WhisperAttention", _WHISPER, q_mask=None, k_mask=None),),
            (Mlp("mlp", ("fc1",), "fc2", mask=None),),
        ),
        "WhisperDecoderLayer": Layer(
            (
                Attention("self_attn", "WhisperAttention", _WHISPER, causal=True),
                Attention("encoder_attn", "WhisperAttention", _WHISPER, cross=True, q_mask=MASK, k_mask=None),
            ),
            (Mlp("mlp", ("fc1",), "fc2"),),
        ),
    },
)

FAMILIES = (
    _vit("vit", "ViT"),
    _vit("deit", "DeiT"),
    _vit("dinov2", "Dinov2"),
    _vit("dinov2_with_registers", "Dinov2WithRegisters"),
    _clip("clip", "CLIP"),
    _clip("siglip", "Siglip"),
    WHISPER,
)
