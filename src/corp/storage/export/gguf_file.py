"""GGUF for llama.cpp: architecture `deci`, a Llama whose layers may have MLPs of different widths; and tokenizers."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp.adapters.registry import Library
from corp.errors import StorageError
from corp.storage.export import llama_cpp
from corp.storage.export.check import on_cpu, outputs, precise
from corp.storage.export.decoder import Decoder
from corp.storage.export.record import Written

GGUF = "gguf"
FILE = "model.gguf"
QUANTS = ("f32", "f16", "bf16", "q8_0")
DEFAULTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f32"}
BLOCK = 32  # q8_0 quantises this many weights of a row together; rows of other lengths stay f16
# Relative to the largest log-probability. Eight bits are coarse; a wrong permutation is off by more than 1.
TOLERANCE = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2, "q8_0": 2e-1}
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
# How a text is split before merging: the rule in tokenizer.json, and llama.cpp's name for it.
SPLITS = {LLAMA_3: "llama-bpe", LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2", TEKKEN: "tekken"}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def export_gguf(
    model: nn.Module, decoder: Decoder, library: Library, folder: Path, name: str, sources: list[str], quant: str | None
) -> Written:
    """Write the pruned `model`, given as `decoder`, into `folder`, whose final name is `name`; run it and compare."""
    require_gguf(quant)
    quant = quant or DEFAULTS[next(model.parameters()).dtype]
    tokenizer, companions = _tokenizer(decoder, library, sources)
    vocabulary = vocabulary_of(tokenizer, decoder.config["vocab_size"])
    write_gguf(decoder, vocabulary, folder / FILE, name=name, quant=quant)
    tokens = library.example(model)["input_ids"][0]
    logits = outputs(on_cpu(model, precise(model)), {"input_ids": tokens[None]})["logits"]
    expected = logits[0, -1].float().log_softmax(-1)  # (vocabulary,), of the next token
    difference = check_gguf(folder / FILE, tokens.tolist(), expected, quant)
    return Written(lambda path: f"llama-server -m {path}/{FILE}", decoder.params, difference, companions, decoder.notes)


def write_gguf(decoder: Decoder, vocabulary: dict[str, Any], path: Path, *, name: str, quant: str) -> None:
    """Write one file with weights, sizes and tokenizer; `vocabulary` comes from vocabulary_of."""
    gguf = _library()
    writer = gguf.GGUFWriter(path, "deci", use_temp_file=True)  # a large model fits on disk, not twice in memory
    _write_sizes(writer, decoder, name)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(quant, f"MOSTLY_{quant.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in vocabulary.items():
        getattr(writer, f"add_{key}")(value)
    for tensor_name, tensor in _tensors(decoder).items():
        kind = gguf.GGMLQuantizationType[_stored_as(tensor, quant)]
        values = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(tensor_name, values, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def require_gguf(quant: str | None) -> None:
    """Refuse an unknown precision, or a Python without the package, before anything is loaded."""
    if quant is not None and quant not in QUANTS:
        raise StorageError(f"quant={quant!r} is not one of {', '.join(QUANTS)}; llama-quantize makes others from f16")
    _library()


def check_gguf(path: Path, tokens: list[int], expected: Tensor, quant: str) -> float | None:
    """The largest difference of next-token log-probabilities, relative to the largest; None without llama.cpp."""
    if not llama_cpp.available():
        return None
    try:
        found = torch.tensor(llama_cpp.next_log_probabilities(path, tokens))
    except RuntimeError as error:
        raise StorageError(f"llama.cpp does not load what was written: {error}") from error
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE[quant]:
        raise StorageError(
            f"llama.cpp disagrees with the pruned model by {difference:.2g} of the largest log-probability, more than "
            f"{TOLERANCE[quant]:g}; nothing was written"
        )
    return difference


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise StorageError("gguf is not installed: pip install 'corp-prune[gguf]'") from error
    return gguf


def _write_sizes(writer: Any, decoder: Decoder, name: str) -> None:
    layers = len(decoder.mlps)
    writer.add_name(name)
    writer.add_vocab_size(decoder.config["vocab_size"])
    writer.add_context_length(decoder.context)
    writer.add_embedding_length(decoder.config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(list(decoder.mlps))
    writer.add_head_count([decoder.config["num_attention_heads"]] * layers)
    writer.add_head_count_kv([decoder.config["num_key_value_heads"]] * layers)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(decoder.heads.width)
    writer.add_rope_freq_base(decoder.base)
    writer.add_layer_norm_rms_eps(decoder.config["rms_norm_eps"])


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    """All tensors under GGUF's names."""
    gguf = _library()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DECI, len(decoder.mlps))
    found = {
        names.get_name(name, (".weight", ".bias")): _interleaved(name, tensor, decoder)
        for name, tensor in decoder.state.items()
    }
    if not decoder.plain_rope:
        found["rope_freqs.weight"] = torch.tensor(decoder.factors)
    return found


def _interleaved(name: str, tensor: Tensor, decoder: Decoder) -> Tensor:
    """Rows of queries and keys in llama.cpp's order, where (0, 1), (2, 3) … are pairs, not (j, j + width/2)."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    count = counts.get(name.split(".")[-2])
    if count is None:
        return tensor
    halves = tensor.unflatten(0, (decoder.config[count], 2, decoder.heads.width // 2))
    made: Tensor = halves.transpose(1, 2).flatten(0, 2)
    return made


def _stored_as(tensor: Tensor, quant: str) -> str:
    """The type of a tensor: norms, biases and rotary factors are float32; rows that q8_0 cannot divide are f16."""
    if tensor.dim() < 2:
        return "F32"
    return "F16" if quant == "q8_0" and tensor.shape[-1] % BLOCK else quant.upper()


def _tokenizer(decoder: Decoder, library: Library, sources: list[str]) -> tuple[Any, list[str]]:
    """The tokenizer for the file, and the names of the files that it came from."""
    from corp.adapters import hf_models  # transformers is imported only when one of its models is written

    with tempfile.TemporaryDirectory() as temporary:
        names = library.companions(sources, Path(temporary))
        if not names:
            places = ", ".join(sources) or "none"
            raise StorageError(f"a GGUF file includes the tokenizer, but corp found none in {places}")
        Path(temporary, "config.json").write_text(json.dumps(decoder.config), encoding="utf-8")
        return hf_models.tokenizer(temporary), names


def vocabulary_of(tokenizer: Any, size: int) -> dict[str, Any]:
    """The description of a fast tokenizer for a GGUFWriter: an argument for each of its methods add_*.

    The vocabulary is padded with unused tokens to the `size` of the model's embedding.
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
    """Scores by which SentencePiece, which prefers the highest, applies the earliest merge first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _split_name(pre: dict[str, Any] | None) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits texts."""
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
        f"corp does not know llama.cpp's name for the way in which this tokenizer splits texts ({regex or kinds}); "
        "known are "
        "those of GPT-2, SmolLM, Llama 3, Qwen2 and Mistral's Tekken, and SentencePiece"
    )


def _prepends(content: dict[str, Any]) -> bool:
    """Whether the tokenizer prepends a space to texts."""
    normalizer, pre = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer]), *pre.get("pretokenizers", [pre])]
    return any(
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
