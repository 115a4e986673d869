"""A pruned language model as a plain Llama with a width per MLP: the basis of GGUF files and vLLM folders.

Both formats know this architecture as Deci's. Models that compute anything else are refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from corp.errors import StorageError
from corp.measure.cost import count_params
from corp.sites import Projection, projection_of
from corp.storage.export.profiles import refuse_beyond
from corp.storage.export.rotary import (
    Heads,
    attentions,
    common_heads,
    named,
    rope_factors,
    scaled,
    static_rope,
    written,
)

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")
REASONS = {
    "Qwen3": "it normalises queries and keys",
    "Gemma3": "it normalises queries and keys, and the output of every layer",
    "Gemma2": "it normalises the output of every layer and caps its logits",
    "Gemma": "it scales its embeddings and has another activation",
    "Phi": "attention and MLP run in parallel, behind a LayerNorm",
    "GPTNeoX": "attention and MLP run in parallel, behind a LayerNorm",
    "OPT": "its positions are learned, not rotary",
    "GPT2": "its positions are learned, not rotary",
}
LAYERS = "model.layers"


@dataclass(frozen=True)
class Decoder:
    """Sizes and tensors of a decoder; `state` has Llama's names and no padding except that of `heads`."""

    config: dict[str, Any]  # of the dense model
    heads: Heads
    mlps: tuple[int, ...]  # the width of every layer's MLP
    context: int
    base: float  # of the rotary frequencies
    factors: tuple[float, ...]  # they are divided by these
    state: dict[str, Tensor]  # without an output head if that is the embedding
    padded: bool  # whether heads of different widths or pairs are padded with zeros to one width

    @property
    def plain_rope(self) -> bool:
        return all(abs(factor - 1) < 1e-6 for factor in self.factors)

    @property
    def params(self) -> int:
        return sum(map(Tensor.numel, self.state.values()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how it is written."""
        made = []
        if self.padded:
            made.append(
                f"heads are padded with zeros to {self.heads.width} of {self.heads.dense} dimensions, because the "
                "format has one width and one set of rotary pairs for all of them"
            )
        if self.context < int(self.config["max_position_embeddings"]):
            made.append(f"the context ends at {self.context} tokens, the model's attention window")
        return tuple(made)


def why_not(model: nn.Module) -> str | None:
    """Why this model is not a plain Llama; None if it is one."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if name not in FAMILIES:
        known = (reason for family, reason in REASONS.items() if name.startswith(family))
        reason = next(known, "the format holds language models with rotary positions, RMSNorm and a gated SiLU MLP")
        return f"{name} cannot be written as a Llama: {reason}"
    raw = config.to_dict() if config is not None else {}
    if raw.get("hidden_act") not in ("silu", "swish"):
        return f"the MLPs of this {name} use {raw.get('hidden_act')!r}, not SiLU"
    if static_rope(raw) is None:
        return f"the format has no rotary positions like those of this {name}: {raw.get('rope_parameters')}"
    return None


def decoder_of(model: Any) -> Decoder:
    """The pruned `model` as a plain Llama, on the CPU."""
    if problem := why_not(model):
        raise StorageError(f"{problem}; use profile='compat'")
    refuse_beyond(model, "a plain Llama")
    heads, config = common_heads(model), model.config.to_dict()
    rope = static_rope(config)
    assert heads is not None
    assert rope is not None
    base = float(rope["rope_theta"])
    # Logits are now divided by sqrt(width) instead of sqrt(dense); yarn multiplies queries and keys by a constant.
    factor = math.sqrt(heads.width / heads.dense) * float(model.model.rotary_emb.attention_scaling) ** 2
    state = {"model.embed_tokens.weight": model.model.embed_tokens.weight, "model.norm.weight": model.model.norm.weight}
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        state["lm_head.weight"] = model.lm_head.weight
    for number, layer in enumerate(model.model.layers):
        state |= {f"{LAYERS}.{number}.{name}": tensor for name, tensor in _layer(layer, heads, factor).items()}
    mlps = tuple(layer.mlp.down_proj.in_features for layer in model.model.layers)
    assert min(mlps) > 0, "programs read a width of 0 as a layer without an MLP"
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    return Decoder(
        config,
        heads,
        mlps,
        _context(model, config),
        base,
        tuple(rope_factors(model, heads, base)),
        tensors,
        sum(map(Tensor.numel, tensors.values())) > count_params(model),
    )


def _layer(layer: Any, heads: Heads, factor: float) -> dict[str, Tensor]:
    parts = written(layer.self_attn, heads)
    parts["q"] = scaled(parts["q"], factor) if factor != 1 else parts["q"]
    made = {f"{norm}.weight": getattr(layer, norm).weight for norm in ("input_layernorm", "post_attention_layernorm")}
    for letter, projection in parts.items():
        made |= named(f"self_attn.{letter}_proj", projection)
    for name, projection in _mlp(layer.mlp).items():
        made |= named(f"mlp.{name}_proj", projection)
    return made


def _mlp(mlp: Any) -> dict[str, Projection]:
    down = projection_of(mlp.down_proj)
    if hasattr(mlp, "gate_proj"):
        return {"gate": projection_of(mlp.gate_proj), "up": projection_of(mlp.up_proj), "down": down}
    weight, bias = projection_of(mlp.gate_up_proj)
    gate, up = weight.chunk(2)
    biases = (None, None) if bias is None else bias.chunk(2)
    return {"gate": Projection(gate, biases[0]), "up": Projection(up, biases[1]), "down": down}


def _context(model: nn.Module, config: dict[str, Any]) -> int:
    """The longest sequence, at most the attention window, within which the window has no effect."""
    longest = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    types = {getattr(module, "sliding_window", window) for module in attentions(model).values()}
    return min([longest, *(int(one) for one in types if one)])
