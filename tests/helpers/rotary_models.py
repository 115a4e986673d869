"""Tiny random rotary decoders (Llama and its kin), batches for them, and their logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import corp
from corp.calibration.settings import Settings
from tests.helpers.hf_models import TEXT
from tests.helpers.seeds import seed_all, seeded

BASE = {**TEXT, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BASE)),
    "llama-biased": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BASE, attention_bias=True, mlp_bias=True)),
    "llama-ungrouped-tied": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**BASE, "num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "mistral-window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**BASE, sliding_window=4)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**BASE, use_sliding_window=True, **LAYERS)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**BASE)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**BASE, **LAYERS, query_pre_attn_scalar=8, attn_logit_softcapping=5.0)
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**BASE, **PARTIAL)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BASE, sliding_window=None)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**BASE, **PARTIAL)),
}


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    seed_all(1)
    model = FAMILIES[family]().eval()
    for parameter in model.parameters():  # not the rotary frequencies: from_pretrained does not cast them either
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():  # random initialisation is tiny: logits must matter
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(8)
            elif "bias" in name:
                parameter.normal_()
    return model


def batches(count: int = 4, *, padded: bool = True) -> list[dict[str, Tensor]]:
    """Sequences of unequal lengths, padded left and right."""
    generator = seeded(0)
    made = []
    for number in range(count):
        ids = torch.randint(3, 50, (5, 11), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :3], mask[1, -4:] = 0, 0
        made.append({"input_ids": ids, "attention_mask": mask} if number % 2 else {"input_ids": ids})
    return made


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch, use_cache=False).logits
    return found


def calibrate(model: nn.Module, data: list[dict[str, Tensor]]) -> corp.Statistics:
    stats = corp.calibrate(model, data, settings=Settings(tokens="all"))
    return dataclasses.replace(stats, inputs=None)  # no need to count operations every time


def data_for(family: str, count: int = 4) -> list[dict[str, Tensor]]:
    """Gemma 2 runs eagerly, where the library's float64 masks make NaN of queries that see nothing: none of these."""
    return batches(count, padded=family != "gemma2")
