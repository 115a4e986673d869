"""Language models and text encoders of transformers: OPT, GPT-2, BERT and its relatives, DistilBERT, MPNet."""

from __future__ import annotations

from typing import Any

from corp.adapters.hf_layers import Attention, Family, Mlp, family
from corp.surgery.hf_attention import BiasedAttention
from corp.surgery.hf_names import Names

ENCODER_MASK = "encoder_attention_mask"


def _three(q: str, k: str, v: str, *out: str, heads: str, **other: Any) -> Names:
    return Names(((q, "q"), (k, "k"), (v, "v")), out, heads, other.pop("scale", "scaling"), "dropout", **other)


def _gpt2(*parts: tuple[str, str]) -> Names:
    return Names(parts, ("c_proj", "resid_dropout"), "num_heads", "scaling", "attn_dropout")


_OPT = _three("q_proj", "k_proj", "v_proj", "out_proj", heads="num_heads")
_BERT = _three("query", "key", "value", heads="num_attention_heads", head_dim="attention_head_size")
_DISTILBERT = _three("q_lin", "k_lin", "v_lin", "out_lin", heads="n_heads", head_dim="attention_head_size")
_MPNET = _three("q", "k", "v", "o", heads="num_attention_heads", head_dim="attention_head_size", scale=None)


def _reordered(attention: Any) -> str | None:
    if attention.reorder_and_upcast_attn:
        return "reorder_and_upcast_attn computes the logits in its own way; set it to False in the config"
    return None


def _gpt2_attention(path: str, names: Names, **other: Any) -> Attention:
    return Attention(path, "GPT2Attention", names, refuse=_reordered, **other)


def _is_causal(_model: Any, attention: Any) -> bool:
    return bool(attention.is_causal)


def _bert(package: str, prefix: str) -> Family:
    """BERT and its descendants, where the output projection is a sibling of the attention."""

    def attention(name: str, cls: str, **other: Any) -> Attention:
        return Attention(f"{name}.self", f"{prefix}{cls}", _BERT, out=f"{name}.output.dense", **other)

    return family(
        package,
        f"{prefix}Layer",
        attention("attention", "SelfAttention", causal=_is_causal),
        attention("crossattention", "CrossAttention", cross=True, k_mask=ENCODER_MASK),
        Mlp("mlp", ("intermediate.dense",), "output.dense"),
    )


FAMILIES = (
    family(
        "opt",
        "OPTDecoderLayer",
        Attention("self_attn", "OPTAttention", _OPT, causal=True),
        Mlp("mlp", ("fc1",), "fc2"),
    ),
    family(
        "gpt2",
        "GPT2Block",
        _gpt2_attention("attn", _gpt2(("c_attn", "qkv")), causal=True),
        _gpt2_attention("crossattention", _gpt2(("q_attn", "q"), ("c_attn", "kv")), cross=True, k_mask=ENCODER_MASK),
        Mlp("mlp", ("mlp.c_fc",), "mlp.c_proj"),
    ),
    _bert("bert", "Bert"),
    _bert("roberta", "Roberta"),
    _bert("xlm_roberta", "XLMRoberta"),
    _bert("camembert", "Camembert"),
    _bert("electra", "Electra"),
    family(
        "distilbert",
        "TransformerBlock",
        Attention("attention", "DistilBertSelfAttention", _DISTILBERT),
        Mlp("ffn", ("ffn.lin1",), "ffn.lin2", cls="FFN"),
    ),
    family(
        "mpnet",
        "MPNetLayer",
        Attention("attention.attn", "MPNetSelfAttention", _MPNET, convention=BiasedAttention),
        Mlp("mlp", ("intermediate.dense",), "output.dense"),
    ),
)
