"""Tiny random Llamas and their kin with tokenizers that GGUF files can hold, pruned layer by layer to other widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import corp
from corp import Recipe, Result
from corp.calibration.settings import Settings
from tests.helpers.hf_folders import sentences
from tests.helpers.seeds import seed_all, seeded

SIZE = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE)),
    "llama-biased-tied": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama-3-frequencies": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, rope_parameters=LLAMA_3)),
    "llama-yarn": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, rope_parameters=YARN)),
    "mistral-window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZE, sliding_window=24)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZE)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SIZE)),
}
UNEVEN = {"model.layers.0.*": {"mlp": 0.3}}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Weights large enough that every part matters."""
    seed_all(1)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(8)
            elif "bias" in name:
                parameter.normal_()
    return model.to(dtype)


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = seeded(0)
    return [{"input_ids": torch.randint(3, 320, (8, 16), generator=generator)} for _ in range(count)]


def pruned(model: Any, recipe: Recipe, pairs: list[int] | None = None) -> Result:
    """`model` pruned by `recipe`; with `pairs`, these rotary pairs matter most in all heads, so that they are kept."""
    if pairs is not None:
        weak = [dim for dim in range(8) if dim % 4 not in pairs]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.view(-1, 8, *parameter.shape[1:])[:, weak] *= 0.05
    stats = corp.calibrate(model, batches(), settings=Settings(tokens="all"))
    return corp.apply(model, stats, corp.plan(model, stats, recipe))


def tokenizer(kind: str = "bytes", size: int = 320) -> hf.PreTrainedTokenizerFast:
    """A BPE tokenizer of at most `size` tokens: byte-level with single digits ("bytes"), or as SentencePiece makes."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        alphabet, special = [], [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    trainer.show_progress = False
    core.train_from_iterator(sentences(60, 20), trainer)
    if kind != "bytes":  # bytes are ordinary tokens of the model, not marks in a text
        core = _without_added(core, special[4:])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _without_added(core: Tokenizer, tokens: list[str]) -> Tokenizer:
    content = json.loads(core.to_str())
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] not in tokens]
    return Tokenizer.from_str(json.dumps(content))


def saved(family: str, folder: Path, recipe: Recipe, pairs: list[int] | None = None) -> Result:
    """The pruned model in a compact folder, with a tokenizer."""
    tokenizer().save_pretrained(folder.parent / "tokenizer")
    result = pruned(build(family), recipe, pairs)
    corp.save(result, folder, companions=[folder.parent / "tokenizer"])
    return result
