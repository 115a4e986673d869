"""Language models and text encoders of transformers: OPT, GPT-2, BERT and its relatives, DistilBERT, MPNet."""

from __future__ import annotations

from typing import Any

from corp.adapters.hf_layers import Attention, Family, Layer, Mlp
from corp.surgery.hf_attention import BiasedAttention
from corp.surgery.hf_names import Names

ENCODER_MASK = "encoder_attention_mask"


def _three(q: str, k: str, v: str, *out: str, heads: str, **other: Any) -> Names:
    return Names(((q, "q"), (k, "k"), (v, "v")), out, heads, other.pop("scale", "scaling"), "dropout", **other)


OPT = Family(
    "opt.modeling_opt",
    {
        "OPTDecoderLayer": Layer(
            (
                Attention(
                    "self_attn",
                    "OPTAttention",
                    _three("q_proj", "k_proj", "v_proj", "out_proj", heads="num_heads"),
                    causal=True,
                ),
            ),
            (Mlp("mlp", ("fc1",), "fc2"),),
        )
    },
)


def _reordered(attention: Any) -> str | None:
    if attention.reorder_and_upcast_attn:
        return "reorder_and_upcast_attn computes the logits in its own way; set it to False in the config"
    return None


def _gpt2(*parts: tuple[str, str]) -> Names:
    return Names(parts, ("c_proj", "resid_dropout"), "num_heads", "scaling", "attn_dropout")


GPT2 = Family(
    "gpt2.modeling_gpt2",
    {
        "GPT2Block": Layer(
            (
                Attention("attn", "GPT2Attention", _gpt2(("c_attn", "qkv")), causal=True, refuse=_reordered),
                Attention(
                    "crossattention",
                    "GPT2Attention",
                    _gpt2(("q_attn", "q"), ("c_attn", "kv")),
                    cross=True,
                    k_mask=ENCODER_MASK,
                    refuse=_reordered,
                ),
            ),
            (Mlp("mlp", ("mlp.c_fc",), "mlp.c_proj"),),
        )
    },
)

_BERT = _three("query", "key", "value", heads="num_attention_heads", head_dim="attention_head_size")


def _bert(module: str, prefix: str) -> Family:
    """BERT and its descendants, where the output projection is a sibling of the attention."""
    layer = Layer(
        (
            Attention(
                "attention.self",
                f"{prefix}SelfAttention",
                _BERT,
                out="attention.output.dense",
                causal=lambda _model, attention: attention.is_causal,
            ),
            Attention(
                "crossattention.self",
                f"{prefix}CrossAttention",
                _BERT,
                out="crossattention.output.dense",
                cross=True,
                k_mask=ENCODER_MASK,
            ),
        ),
        (Mlp("mlp", ("intermediate.dense",), "output.dense"),),
    )
    return Family(module, {f"{prefix}Layer": layer})


BERTS = tuple(
    _bert(f"{package}.modeling_{package}", prefix)
    for package, prefix in (
        ("bert", "Bert"),
        ("roberta", "Roberta"),
        ("xlm_roberta", "XLMRoberta"),
        ("camembert", "Camembert"),
        ("electra", "Electra"),
    )
)

DISTILBERT = Family(
    "distilbert.modeling_distilbert",
    {
        "TransformerBlock": Layer(
            (
                Attention(
                    "attention",
                    "DistilBertSelfAttention",
                    _three("q_lin", "k_lin", "v_lin", "out_lin", heads="n_heads", head_dim="attention_head_size"),
                ),
            ),
            (Mlp("ffn", ("ffn.lin1",), "ffn.lin2", cls="FFN"),),
        )
    },
)

MPNET = Family(
    "mpnet.modeling_mpnet",
    {
        "MPNetLayer": Layer(
            (
                Attention(
                    "attention.attn",
                    "MPNetSelfAttention",
                    _three("q", "k", "v", "o", heads="num_attention_heads", head_dim="attention_head_size", scale=None),
                    convention=BiasedAttention,
                ),
            ),
            (Mlp("mlp", ("intermediate.dense",), "output.dense"),),
        )
    },
)

FAMILIES = (OPT, GPT2, *BERTS, DISTILBERT, MPNET)
