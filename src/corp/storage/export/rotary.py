"""Rotary heads of one width for the whole model, as plain transformers, vLLM and llama.cpp require.

Layers of a pruned model may keep different rotary pairs and value widths. Written with the union of all kept pairs,
every head has the same frequencies, and zeros where it kept fewer. If the union contains every pair, heads are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.sites import Projection, projection_of
from corp.surgery.hf_attention import RotaryAttention

STATIC = ("default", "linear", "llama3", "yarn")  # rope types whose frequencies do not depend on the sequence


class Heads(NamedTuple):
    """The heads of all layers in an export: `width` of `dense` dimensions, for queries, keys and values."""

    dense: int
    width: int
    pairs: tuple[int, ...]  # which of the dense head's rotary pairs: width / 2 of them, ascending

    @property
    def narrower(self) -> bool:
        return self.width < self.dense


def attentions(model: nn.Module) -> dict[str, Any]:
    """The attentions of a decoder with rotary positions, by name; empty if one of them is of another kind."""
    found = {name: module for name, module in model.named_modules() if name.endswith(".self_attn")}
    plain = all(hasattr(m, "o_proj") and (hasattr(m, "q_proj") or hasattr(m, "qkv_proj")) for m in found.values())
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    return found if plain and hasattr(rotary, "inv_freq") else {}  # Gemma 3 has two tables of frequencies


def common_heads(model: nn.Module) -> Heads | None:
    """The narrowest heads that can hold those of all layers; None if the model is not a rotary decoder."""
    found = attentions(model)
    if not found:
        return None
    dense = 2 * len(frequencies(model))
    used = sorted({pair for module in found.values() for head in _pairs(module) for pair in head})
    values = max(_widths(module)[1] for module in found.values())
    width = max(2 * len(used), values + values % 2)
    spare = [pair for pair in range(dense // 2) if pair not in used]
    return Heads(dense, width, tuple(sorted([*used, *spare[: width // 2 - len(used)]])))


def frequencies(model: Any) -> Tensor:
    """Radians per position of every pair of the dense head, (dense / 2,)."""
    found: Tensor = model.model.rotary_emb.inv_freq
    return found.detach().double().cpu()


def rope_factors(model: Any, heads: Heads, base: float) -> list[float]:
    """What base^(-2j / width) is divided by to give the frequency of the j-th written pair."""
    plain = base ** (-2 * torch.arange(len(heads.pairs), dtype=torch.float64) / heads.width)
    factors: list[float] = (plain / frequencies(model)[list(heads.pairs)]).tolist()
    return factors


def longrope(base: float, factors: Sequence[float], context: int) -> dict[str, Any]:
    """Rope parameters with one list of divisors for short and long sequences, and an attention factor of 1."""
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": list(factors),
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def written(attention: Any, heads: Heads) -> dict[str, Projection]:
    """q, k, v and o of one attention with heads of the common width."""
    parts = _split(attention)
    kept = torch.tensor(_pairs(attention))  # (K, m)
    K, H = len(kept), len(parts["q"].weight) // (2 * kept.shape[1])
    o = projection_of(attention.o_proj)
    return {
        "q": _placed(parts["q"], kept.repeat_interleave(H // K, 0), heads),
        "k": _placed(parts["k"], kept, heads),
        "v": _each(parts["v"], lambda tensor: _grown(tensor, K, heads.width, 0)),
        "o": Projection(_grown(o.weight, H, heads.width, 1), o.bias),
    }


def scaled(projection: Projection, factor: float) -> Projection:
    """The queries times `factor`, rounded once to their dtype."""
    return _each(projection, lambda tensor: (tensor.double() * factor).to(tensor.dtype))


def _each(projection: Projection, change: Callable[[Tensor], Tensor]) -> Projection:
    """A linear layer whose weight, and bias if there is one, are changed."""
    weight, bias = projection
    return Projection(change(weight), None if bias is None else change(bias))


def written_state(model: nn.Module, heads: Heads) -> dict[str, Tensor]:
    """The parameters of all attentions with separate projections, under their names, with the common width."""
    return {
        name: tensor
        for place, attention in attentions(model).items()
        for letter, projection in written(attention, heads).items()
        for name, tensor in named(f"{place}.{letter}_proj", projection).items()
    }


def named(name: str, projection: Projection) -> dict[str, Tensor]:
    """The parameters of a linear layer under its name."""
    found = {f"{name}.weight": projection.weight}
    return found if projection.bias is None else {**found, f"{name}.bias": projection.bias}


def static_rope(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rope parameters of a config if all layers and sequence lengths share them, otherwise None."""
    rope = config.get("rope_parameters")
    flat = isinstance(rope, dict) and rope.get("rope_type", "default") in STATIC and "rope_theta" in rope
    whole = flat and (rope or {}).get("partial_rotary_factor", 1.0) == 1.0
    return rope if whole else None


def _pairs(attention: Any) -> list[list[int]]:
    """The rotary pairs of every key head."""
    if isinstance(attention, RotaryAttention):
        dims: list[list[int]] = attention.frequencies.tolist()
        return [dims_of_head[: len(dims_of_head) // 2] for dims_of_head in dims]
    count: int = attention.config.num_key_value_heads
    return [list(range(attention.head_dim // 2))] * count


def _widths(attention: Any) -> tuple[int, int]:
    """The widths of a query head and of a value head."""
    if isinstance(attention, RotaryAttention):
        return attention.qk_dim, attention.v_dim
    return attention.head_dim, attention.head_dim


def _split(attention: Any) -> dict[str, Projection]:
    """Queries, keys and values, whether packed in one layer or not."""
    if hasattr(attention, "q_proj"):
        return {letter: projection_of(getattr(attention, f"{letter}_proj")) for letter in "qkv"}
    whole, (qk, v) = projection_of(attention.qkv_proj), _widths(attention)
    K, H = attention.config.num_key_value_heads, attention.config.num_attention_heads
    sizes = [H * qk, K * qk, K * v]
    biases = whole.bias.split(sizes) if whole.bias is not None else (None, None, None)
    return {one: Projection(w, b) for one, w, b in zip("qkv", whole.weight.split(sizes), biases, strict=True)}


def _placed(projection: Projection, kept: Tensor, heads: Heads) -> Projection:
    """Rows of kept pairs (H, m), in separate halves, at the positions of these pairs among the written ones."""
    slots = torch.searchsorted(torch.tensor(heads.pairs), kept)
    rows = torch.cat([slots, slots + len(heads.pairs)], 1)  # (H, 2m)

    def place(tensor: Tensor) -> Tensor:
        whole = tensor.new_zeros(len(rows), heads.width, *tensor.shape[1:])
        whole[torch.arange(len(rows))[:, None], rows] = tensor.unflatten(0, (len(rows), -1))
        return whole.flatten(0, 1)

    return _each(projection, place)


def _grown(tensor: Tensor, heads: int, width: int, dim: int) -> Tensor:
    """Pad the dimensions of every head with zeros along `dim`."""
    split = tensor.unflatten(dim, (heads, -1))
    zeros = split.new_zeros(*split.shape[: dim + 1], width - split.shape[dim + 1], *split.shape[dim + 2 :])
    return torch.cat([split, zeros], dim + 1).flatten(dim, dim + 1)
