"""Where a pruned model can go: its own library (two profiles), ONNX, PT2, vLLM, llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from corp.adapters.registry import library_of
from corp.errors import StorageError
from corp.measure.cost import count_params
from corp.storage.export.formats import LIBRARIES, ONNX, PT2, load_lines, require_packages, write_format
from corp.storage.export.gguf_file import require_gguf
from corp.storage.export.graphs import inputs_for
from corp.storage.export.profiles import LIBRARY_TARGETS, PROFILES, STANDARD, library_for, write_profile
from corp.storage.export.record import Exported, write_record
from corp.storage.export.served import GGUF, SERVED, load_line, write_served
from corp.surgery.apply import history

TARGETS = (*LIBRARY_TARGETS.values(), ONNX, PT2, *SERVED)


def choose(
    base: dict[str, Any] | None, target: str | None, profile: str | None, quant: str | None = None
) -> tuple[str, str | None]:
    """Target and profile for the model that `base` names, from what was asked for; what cannot be is refused."""
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
    """Write the pruned `model` into `folder`, which will be called `path`, read it back, and compare.

    `base` is how its dense architecture is rebuilt, `chosen` what `choose` gave. Tokenizer and preprocessing come from
    the first of `sources` that has them.
    """
    target, profile = chosen
    if profile is not None:
        return write_profile(model, base, folder, path, profile, sources, record)
    library = library_of(str((base or {}).get("adapter")))
    if target in SERVED:
        if library is None or library.name != "transformers":
            raise StorageError(f"{target} takes language models of transformers, and this is none")
        made = write_served(model, library, folder, path, target, sources, quant)
        shown = replace(made, load=load_line(target, path.resolve().name))
        write_record(folder, path.resolve().name, shown, {"base": base, **record}, history(model))
        return made
    if library is None:
        raise StorageError(
            "no library says what inputs this model takes; trace it with an example: "
            f"corp.storage.export.formats.write_format(model, folder, {target!r}, batch)"
        )
    batch = library.example(model)
    difference = write_format(model, folder, target, batch)
    names, params = list(inputs_for(model, batch)), count_params(model)
    made = Exported(
        target,
        None,
        LIBRARIES[target],
        load_lines(target, str(path), names),
        (params, params),
        difference,
        tuple(library.companions(sources, folder)),
    )
    shown = replace(made, load=load_lines(target, path.resolve().name, names))
    write_record(folder, path.resolve().name, shown, {"base": base, **record}, history(model))
    return made
