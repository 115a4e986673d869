"""A folder for vLLM: DeciLMForCausalLM, a Llama whose `block_configs` give every layer's MLP its own width.

vLLM has the model, but transformers has no config of this name: a few lines of code in the folder define it, which
requires --trust-remote-code. To verify the folder, the same fields are read back into transformers' own Llama.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp.adapters.registry import Library
from corp.io.files import write_tensors
from corp.storage.export.check import largest_difference, precise, require_agreement
from corp.storage.export.decoder import LAYERS, Decoder
from corp.storage.export.record import Written
from corp.storage.export.rotary import longrope

VLLM = "vllm"
NOTE = "vLLM itself was not run: the folder was read back, by the fields that vLLM reads, into transformers' Llama"
MULTIPLE = 256  # programs that read only ffn_mult round the width up to this
CODE = "configuration_decilm.py"
CONFIG_CLASS = '''"""The config of a Llama whose layers have MLPs of different widths."""

from transformers import PretrainedConfig


class Fields(dict):
    """A JSON object whose entries can be read as attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, block_configs=(), **kwargs):
        super().__init__(**kwargs)
        self.block_configs = [
            Fields({part: Fields(fields) for part, fields in block.items()}) for block in block_configs
        ]
'''
COPIED = ("hidden_size", "vocab_size", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")


def export_vllm(model: nn.Module, decoder: Decoder, library: Library, folder: Path, sources: list[str]) -> Written:
    """Write the pruned `model`, given as `decoder`, into `folder`, read it back, and compare."""
    from corp.adapters.hf_export import read_deci  # transformers is imported only when one of its models is written

    write_vllm(decoder, folder)
    companions = library.companions(sources, folder)
    difference = largest_difference(model, read_deci(folder, precise(model)), library.example(model))
    # Scaled queries are rounded once more than the pruned model's, which is visible in half precision.
    require_agreement(difference, next(model.parameters()).dtype if decoder.heads.narrower else precise(model))
    notes = (*decoder.notes, NOTE)
    return Written(lambda path: f"vllm serve {path} --trust-remote-code", decoder.params, difference, companions, notes)


def write_vllm(decoder: Decoder, folder: Path) -> None:
    """Write config, its class, and the weights under Llama's names."""
    state = complete_biases(decoder)
    config = config_of(decoder, state)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / CODE).write_text(CONFIG_CLASS, encoding="utf-8")
    # safetensors refuses tensors that share memory, such as the halves of a packed layer.
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    write_tensors(folder / "model.safetensors", own, metadata={"format": "pt"})


def config_of(decoder: Decoder, state: dict[str, Tensor]) -> dict[str, Any]:
    """The contents of config.json, with the rotary parameters where old and new programs look for them."""
    rope = rope_of(decoder)
    first = f"{LAYERS}.0"
    return {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": f"{Path(CODE).stem}.DeciLMConfig"},
        **{key: decoder.config.get(key) for key in COPIED},
        "num_hidden_layers": len(decoder.mlps),
        "num_attention_heads": decoder.config["num_attention_heads"],
        "num_key_value_heads": decoder.config["num_key_value_heads"],
        "head_dim": decoder.heads.width,
        "intermediate_size": max(decoder.mlps),
        "hidden_act": "silu",
        "max_position_embeddings": decoder.context,
        "rope_theta": decoder.base,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_parameters": rope,
        "attention_bias": f"{first}.self_attn.q_proj.bias" in state,
        "mlp_bias": f"{first}.mlp.down_proj.bias" in state,
        "tie_word_embeddings": "lm_head.weight" not in state,
        "torch_dtype": str(decoder.state["model.norm.weight"].dtype).removeprefix("torch."),
        "block_configs": blocks_of(decoder),
    }


def blocks_of(decoder: Decoder) -> list[dict[str, Any]]:
    """The config of every layer. `ffn_mult` takes precedence over the width, so it is written only if both agree."""
    group = decoder.config["num_attention_heads"] // decoder.config["num_key_value_heads"]
    round_ = all(width % MULTIPLE == 0 for width in decoder.mlps)
    blocks = []
    for width in decoder.mlps:
        ffn = {"no_op": False, "intermediate_size": width}
        mult = {"ffn_mult": 1.5 * width / decoder.config["hidden_size"]} if round_ else {}
        blocks.append({"attention": {"no_op": False, "n_heads_in_group": group}, "ffn": {**ffn, **mult}})
    return blocks


def rope_of(decoder: Decoder) -> dict[str, Any]:
    """The rope parameters: a list of divisors (called longrope) if frequencies are not the plain ones."""
    plain = {"rope_type": "default", "rope_theta": decoder.base}
    return plain if decoder.plain_rope else longrope(decoder.base, decoder.factors, decoder.context)


def complete_biases(decoder: Decoder) -> dict[str, Tensor]:
    """The weights, with zeros for missing biases, because one flag covers all biases of a kind."""
    state = dict(decoder.state)
    for part in ("self_attn", "mlp"):
        linears = [name.removesuffix(".weight") for name in decoder.state if f".{part}." in name and "weight" in name]
        if any(f"{name}.bias" in state for name in linears):
            for name in linears:
                weight = state[f"{name}.weight"]
                state.setdefault(f"{name}.bias", weight.new_zeros(len(weight)))
    return state
