"""Tiny random transformers models with tokenizers and preprocessing, in folders as from_pretrained takes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from tests.helpers.seeds import seed_all, seeded

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree"]
WORDS += ["and", "then", "it", "was", "happy", "sad", "big", "small", ".", ","]
SPECIAL = ["<pad>", "</s>", "<unk>", "<s>"]


def tokenizer(*, bos: str | None = "<s>", both_ends: bool = False) -> transformers.PreTrainedTokenizerFast:
    """One token per word. `bos` goes before every text; with both_ends, </s> after it as well."""
    words = [*SPECIAL, *WORDS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos is not None:
        single = f"{bos} $A </s>" if both_ends else f"{bos} $A"
        ids = [(token, words.index(token)) for token in dict.fromkeys([bos, "</s>"])]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos or "<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def _save(model: nn.Module, folder: Path, tok: transformers.PreTrainedTokenizerFast) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # large enough that every part of it matters to the output
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)  # type: ignore[operator]
    tok.save_pretrained(folder)
    return folder


def opt(folder: Path, seed: int = 0) -> Path:
    seed_all(seed)
    config = transformers.OPTConfig(
        vocab_size=32,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=24,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return _save(transformers.OPTForCausalLM(config), folder, tokenizer(bos="</s>"))


def llama(folder: Path, seed: int = 0, tok: transformers.PreTrainedTokenizerFast | None = None) -> Path:
    seed_all(seed)
    config = transformers.LlamaConfig(
        vocab_size=32 if tok is None else len(tok),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=32,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )
    return _save(transformers.LlamaForCausalLM(config), folder, tok or tokenizer())


def bert(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    seed_all(seed)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    return _save(transformers.BertModel(config), folder, tokenizer(both_ends=True))


def vit(folder: Path, seed: int = 0) -> Path:
    seed_all(seed)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 16, "width": 16},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def sentences(count: int, length: int = 12, seed: int = 0) -> list[str]:
    draw = seeded(seed)
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=draw).tolist()) for _ in range(count)
    ]


def texts(path: Path) -> Path:
    """A file of 60 documents of 40 words."""
    path.write_text("\n".join(json.dumps({"text": line}) for line in sentences(60, 40)))
    return path
