"""A tokenizer of transformers as the keys that GGUF files have for it."""

from __future__ import annotations

import json
import re
from typing import Any

from corp.errors import StorageError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before merging: what tokenizer.json says, and llama.cpp's name for it.
SPLITS = {LLAMA_3: "llama-bpe", LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2", TEKKEN: "tekken"}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def vocabulary_of(tokenizer: Any, size: int) -> dict[str, Any]:
    """What a GGUFWriter has to be told of a fast tokenizer: an argument for each of its methods add_*.

    The vocabulary is filled up with unused tokens to the `size` of the model's embedding.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model.get("type") != "BPE":
        raise StorageError(f"a GGUF file cannot hold a tokenizer of type {model.get('type')!r}, only BPE")
    fallback = bool(model.get("byte_fallback"))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens, types = _tokens(content, size, fallback)
    ids = tokenizer("a")["input_ids"]
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    made: dict[str, Any] = {
        "tokenizer_model": "llama" if fallback else "gpt2",  # SentencePiece, or byte-level
        "tokenizer_pre": "default" if fallback else _split_name(content["pre_tokenizer"]),
        "token_list": tokens,
        "token_types": types,
    }
    if fallback:
        made |= {"token_scores": _scores(tokens, merges), "add_space_prefix": _prepends(content)}
    else:
        made["token_merges"] = merges
    made |= {name: token for name, token in special.items() if token is not None}
    made["add_bos_token"] = bool(ids) and ids[0] == special["bos_token_id"]
    made["add_eos_token"] = bool(ids) and ids[-1] == special["eos_token_id"]
    if isinstance(tokenizer.chat_template, str):
        made["chat_template"] = tokenizer.chat_template
    return made


def _tokens(content: dict[str, Any], size: int, fallback: bool) -> tuple[list[str], list[int]]:
    if (count := 1 + max(content["model"]["vocab"].values())) > size:
        raise StorageError(
            f"the tokenizer has {count} tokens, the model's embedding {size}: they do not belong together"
        )
    tokens, types = [f"[UNUSED{number}]" for number in range(size)], [UNUSED] * size
    for token, number in content["model"]["vocab"].items():
        tokens[number], types[number] = token, BYTE if fallback and BYTE_TOKEN.fullmatch(token) else NORMAL
    for added in content["added_tokens"]:
        number = added["id"]
        unknown = added["content"] == content["model"].get("unk_token") or added["content"] == "<unk>"
        tokens[number] = added["content"]
        types[number] = UNKNOWN if unknown else CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece joins what makes the token of the highest score; here that is the earliest merge."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _split_name(pre: dict[str, Any] | None) -> str:
    """llama.cpp's name for the way that a byte-level tokenizer cuts texts."""
    steps = (pre or {}).get("pretokenizers", [pre or {}])
    kinds = [step.get("type") for step in steps]
    regex = next((step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"), None)
    if regex in SPLITS:
        return SPLITS[regex]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    raise StorageError(
        f"the tokenizer cuts texts in a way whose name in llama.cpp is not known here ({regex or kinds}); known are "
        "those of GPT-2, SmolLM, Llama 3, Qwen2 and Mistral's Tekken, and SentencePiece"
    )


def _prepends(content: dict[str, Any]) -> bool:
    """Whether a text gets a space in front."""
    normalizer, pre = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer]), *pre.get("pretokenizers", [pre])]
    return any(
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
