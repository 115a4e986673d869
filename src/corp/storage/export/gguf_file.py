"""GGUF for llama.cpp: architecture `deci`, which is a Llama whose layers may have MLPs of different widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corp.errors import StorageError
from corp.storage.export import llama_cpp
from corp.storage.export.decoder import LAYERS, Decoder

FILE = "model.gguf"
QUANTS = ("f32", "f16", "bf16", "q8_0")
DEFAULTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f32"}
BLOCK = 32  # q8_0 quantises so many weights of a row together; rows of other lengths stay f16
# Of the largest log-probability. Eight bits are coarse; a wrong permutation is off by more than 1.
TOLERANCE = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2, "q8_0": 2e-1}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(decoder: Decoder, vocabulary: dict[str, Any], path: Path, *, name: str, quant: str) -> None:
    """Write one file with weights, sizes and tokenizer; `vocabulary` is what gguf_vocabulary makes of that."""
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
        raise StorageError(f"quant={quant!r} is not one of {', '.join(QUANTS)}; llama-quantize makes all others of f16")
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
    found = {_gguf_name(name): _interleaved(name, tensor, decoder) for name, tensor in decoder.state.items()}
    if not decoder.plain_rope:
        found["rope_freqs.weight"] = torch.tensor(decoder.factors)
    return found


def _gguf_name(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{parameter}"
    number, _, inner = module.removeprefix(f"{LAYERS}.").partition(".")
    return f"blk.{number}.{NAMES[inner]}.{parameter}"


def _interleaved(name: str, tensor: Tensor, decoder: Decoder) -> Tensor:
    """Rows of queries and keys as llama.cpp rotates them: (0, 1), (2, 3) … are pairs, not (j, j + width/2)."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    count = counts.get(name.split(".")[-2])
    if count is None:
        return tensor
    halves = tensor.unflatten(0, (decoder.config[count], 2, decoder.heads.width // 2))
    made: Tensor = halves.transpose(1, 2).flatten(0, 2)
    return made


def _stored_as(tensor: Tensor, quant: str) -> str:
    """Norms, biases and rotary factors are float32; rows that q8_0 cannot cut are f16."""
    if tensor.dim() < 2:
        return "F32"
    return "F16" if quant == "q8_0" and tensor.shape[-1] % BLOCK else quant.upper()
