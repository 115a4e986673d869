"""The export targets of a pruned model: its own library (two profiles), ONNX, PT2, vLLM, llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from corp.adapters.registry import Library, library_of
from corp.errors import StorageError
from corp.measure.cost import count_params
from corp.storage.export.decoder import decoder_of
from corp.storage.export.formats import ONNX, PT2, inputs_for, load_lines, require_packages, write_format
from corp.storage.export.gguf_file import GGUF, export_gguf, require_gguf
from corp.storage.export.profiles import LIBRARY_TARGETS, PROFILES, STANDARD, library_for, write_profile
from corp.storage.export.record import Exported, Written, write_record
from corp.storage.export.vllm_folder import VLLM, export_vllm
from corp.surgery.apply import history

SERVED = (VLLM, GGUF)
TARGETS = (*LIBRARY_TARGETS.values(), ONNX, PT2, *SERVED)
LOADED_BY = {target: library for library, target in LIBRARY_TARGETS.items()}
LOADED_BY |= {ONNX: "onnxruntime", PT2: "torch", GGUF: "llama.cpp", VLLM: "vllm"}


def choose(
    base: dict[str, Any] | None, target: str | None, profile: str | None, quant: str | None = None
) -> tuple[str, str | None]:
    """Target and profile of a request for the model that `base` names; impossible requests are refused."""
    if target is not None and target not in TARGETS:
        raise StorageError(f"to={target!r} is not one of {', '.join(TARGETS)}")
    if quant is not None and target != GGUF:
        raise StorageError(f"quant={quant!r} goes with to='gguf'")
    if target in (ONNX, PT2, *SERVED):
        if profile is not None:
            raise StorageError(f"profile={profile!r} goes with to=timm or hf; {target} holds the true widths")
        if target == GGUF:
            require_gguf(quant)
        if target == ONNX:
            require_packages("onnx", "onnxscript")
        return target, None
    if profile is not None and profile not in PROFILES:
        raise StorageError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    library, _ = library_for(base)
    own = LIBRARY_TARGETS[library.name]
    if target not in (None, own):
        raise StorageError(f"this is a model of {library.name}, which {target} cannot load; use to={own!r}")
    return own, profile or STANDARD


def write(
    model: nn.Module,
    base: dict[str, Any] | None,
    folder: Path,
    path: Path,
    chosen: tuple[str, str | None],
    sources: list[str],
    record: dict[str, Any],
    quant: str | None = None,
) -> Exported:
    """Write the pruned `model` into `folder`, whose final name is `path`, read it back, and compare.

    `base` tells how to rebuild its dense architecture, `chosen` comes from `choose`. Tokenizer and preprocessing are
    taken from the first of `sources` that has them.
    """
    target, profile = chosen
    name, library = path.resolve().name, library_of(str((base or {}).get("adapter")))
    if profile is not None:
        written = write_profile(model, base, folder, profile, sources)
    elif target in SERVED:
        if library is None or library.name != "transformers":
            raise StorageError(f"{target} takes only language models of transformers, and this model is not one")
        decoder = decoder_of(model)
        if target == VLLM:
            written = export_vllm(model, decoder, library, folder, sources)
        else:
            written = export_gguf(model, decoder, library, folder, name, sources, quant)
    else:
        written = _write_graph(model, library, folder, target, sources)
    load, params = written.load(str(path)), (count_params(model), written.params)
    companions = tuple(written.companions)
    made = Exported(target, profile, LOADED_BY[target], load, params, written.difference, companions, written.notes)
    shown = replace(made, load=written.load(name))  # the folder may move, so only its name is recorded
    write_record(folder, name, shown, record if profile else {"base": base, **record}, history(model))
    return made


def _write_graph(model: nn.Module, library: Library | None, folder: Path, target: str, sources: list[str]) -> Written:
    if library is None:
        raise StorageError(
            "no library says what inputs this model takes; trace it with an example: "
            f"corp.storage.export.formats.write_format(model, folder, {target!r}, batch)"
        )
    batch = library.example(model)
    difference = write_format(model, folder, target, batch)
    names, companions = list(inputs_for(model, batch)), library.companions(sources, folder)
    return Written(lambda path: load_lines(target, path, names), count_params(model), difference, companions)
