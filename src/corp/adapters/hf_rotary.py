"""Decoders with rotary positions: Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX."""

from __future__ import annotations

from typing import Any

from corp.adapters.hf_layers import Attention, Family, Mlp, family
from corp.adapters.structure import NORMALISED
from corp.surgery.hf_attention import RotaryAttention
from corp.surgery.hf_names import Names

_SEPARATE = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"))
_HEADS = {"heads": "config.num_attention_heads", "kv_heads": "config.num_key_value_heads"}
_GATED = ("mlp.gate_proj", "mlp.up_proj")


def rotary_names(*out: str, parts: Any = _SEPARATE, extras: tuple[tuple[str, str], ...] = (), **other: Any) -> Names:
    return Names(parts, out, scale="scaling", drop="attention_dropout", extras=extras, **{**_HEADS, **other})


def _attention(cls: str, names: Names, **other: Any) -> Attention:
    return Attention("self_attn", cls, names, causal=True, convention=RotaryAttention, **other)


def window_of(module: Any) -> int | None:
    """The layer's own value if layers differ, otherwise the model's."""
    known: int | None = getattr(module, "sliding_window", None)
    return getattr(module.config, "sliding_window", None) if not hasattr(module, "sliding_window") else known


def _family(
    package: str, prefix: str, attention: Attention, up: tuple[str, ...] = _GATED, down: str = "mlp.down_proj"
) -> Family:
    mlp = Mlp("mlp", up, down, cls=f"{prefix}MLP")
    return family(package, f"{prefix}DecoderLayer", attention, mlp)


def _layer_norms(module: Any) -> str | None:
    return NORMALISED if module.qk_layernorm else None


def _bidirectional(module: Any) -> str | None:
    return None if module.is_causal else "use_bidirectional_attention is not understood"


WINDOW = (("sliding_window", "sliding_window"),)
CONFIG_WINDOW = (("sliding_window", "config.sliding_window"),)
NORMED = rotary_names("o_proj", extras=WINDOW, norms=("q_norm", "k_norm"))
SOFT = rotary_names("o_proj", extras=(*WINDOW, ("softcap", "attn_logit_softcapping")))
WINDOWED = rotary_names("o_proj", extras=CONFIG_WINDOW)
PACKED = rotary_names("o_proj", parts=(("qkv_proj", "qkv"),), extras=CONFIG_WINDOW)
BY_HEAD = rotary_names("dense", parts=(("query_key_value", "qkv"),), by_head=True, head_dim="head_size", kv_heads=None)

FAMILIES = (
    _family("llama", "Llama", _attention("LlamaAttention", rotary_names("o_proj"))),
    _family("mistral", "Mistral", _attention("MistralAttention", WINDOWED, window=window_of)),
    _family("qwen2", "Qwen2", _attention("Qwen2Attention", rotary_names("o_proj", extras=WINDOW), window=window_of)),
    _family("qwen3", "Qwen3", _attention("Qwen3Attention", NORMED, window=window_of)),
    # Its MLPs are mixtures of experts, found by structure.
    family("qwen3_moe", "Qwen3MoeDecoderLayer", _attention("Qwen3MoeAttention", NORMED, window=window_of)),
    family(
        "qwen3_vl",
        "Qwen3VLTextDecoderLayer",
        _attention("Qwen3VLTextAttention", rotary_names("o_proj", norms=NORMED.norms)),
        Mlp("mlp", _GATED, "mlp.down_proj", cls="Qwen3VLTextMLP"),
    ),
    _family("gemma", "Gemma", _attention("GemmaAttention", rotary_names("o_proj"), refuse=_bidirectional)),
    _family("gemma2", "Gemma2", _attention("Gemma2Attention", SOFT, window=window_of, refuse=_bidirectional)),
    _family(
        "gemma3",
        "Gemma3",
        _attention("Gemma3Attention", NORMED, window=window_of, refuse=_bidirectional, gain_shift=1.0),
    ),
    _family(
        "phi", "Phi", _attention("PhiAttention", rotary_names("dense"), refuse=_layer_norms), ("mlp.fc1",), "mlp.fc2"
    ),
    _family("phi3", "Phi3", _attention("Phi3Attention", PACKED, window=window_of), ("mlp.gate_up_proj",)),
    family(
        "gpt_neox",
        "GPTNeoXLayer",
        Attention("attention", "GPTNeoXAttention", BY_HEAD, causal=True, convention=RotaryAttention),
        Mlp("mlp", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", cls="GPTNeoXMLP"),
    ),
)
