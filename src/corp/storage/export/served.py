"""Language models for the programs that serve them: vLLM (a folder) and llama.cpp (a GGUF file)."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from corp.adapters.registry import Library
from corp.errors import StorageError
from corp.storage.export.check import largest_difference, on_cpu, outputs, precise, require_agreement
from corp.storage.export.decoder import Decoder, decoder_of
from corp.storage.export.gguf_file import DEFAULTS, FILE, check_gguf, require_gguf, write_gguf
from corp.storage.export.gguf_vocabulary import vocabulary_of
from corp.storage.export.profiles import refuse_beyond_widths
from corp.storage.export.record import Written
from corp.storage.export.vllm_folder import write_vllm
from corp.surgery.apply import history

GGUF, VLLM = "gguf", "vllm"
SERVED = (VLLM, GGUF)
VLLM_NOTE = "vLLM itself was not run: the folder was read back, by the fields that vLLM reads, into transformers' Llama"


def write_served(
    model: nn.Module, library: Library, folder: Path, name: str, target: str, sources: list[str], quant: str | None
) -> Written:
    """Write the pruned `model` for `target` into `folder`, which will be called `name`, read it back, and compare."""
    refuse_beyond_widths(history(model), target)
    decoder, batch = decoder_of(model), library.example(model)
    if target == VLLM:
        write_vllm(decoder, folder)
        companions, notes = library.companions(sources, folder), (*decoder.notes, VLLM_NOTE)
        difference: float | None = _check_vllm(model, decoder, folder, batch)
    else:
        require_gguf(quant)
        quant = quant or DEFAULTS[next(model.parameters()).dtype]
        tokenizer, companions = _tokenizer(decoder, library, sources)
        vocabulary = vocabulary_of(tokenizer, decoder.config["vocab_size"])
        write_gguf(decoder, vocabulary, folder / FILE, name=name, quant=quant)
        notes = decoder.notes
        tokens = batch["input_ids"][0]
        logits = outputs(on_cpu(model, precise(model)), {"input_ids": tokens[None]})["logits"]
        expected = logits[0, -1].float().log_softmax(-1)  # (vocabulary,), of the token behind them
        difference = check_gguf(folder / FILE, tokens.tolist(), expected, quant)
    params = sum(map(Tensor.numel, decoder.state.values()))
    return Written(partial(load_line, target), params, difference, companions, notes)


def load_line(target: str, path: str) -> str:
    """The shell command that serves it."""
    return f"vllm serve {path} --trust-remote-code" if target == VLLM else f"llama-server -m {path}/{FILE}"


def _check_vllm(model: nn.Module, decoder: Decoder, folder: Path, batch: Any) -> float:
    reread = import_module("corp.adapters.hf_export").read_deci(folder, precise(model))
    difference = largest_difference(model, reread, batch)
    # Scaled queries are rounded once more than the pruned model's: in half precision that shows.
    require_agreement(difference, next(model.parameters()).dtype if decoder.heads.narrower else precise(model))
    return difference


def _tokenizer(decoder: Decoder, library: Library, sources: list[str]) -> tuple[Any, list[str]]:
    """The tokenizer that goes into the file, and the names of the files that it was in."""
    with tempfile.TemporaryDirectory() as temporary:
        names = library.companions(sources, Path(temporary))
        if not names:
            places = ", ".join(sources) or "none"
            raise StorageError(f"a GGUF file holds its tokenizer, and there is none in the places known: {places}")
        Path(temporary, "config.json").write_text(json.dumps(decoder.config), encoding="utf-8")
        return import_module("corp.adapters.hf_models").tokenizer(temporary), names
