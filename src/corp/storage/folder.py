"""Save and load pruned models: a folder of safetensors and JSON. No pickle, no hub, no code from files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corp import __version__
from corp.adapters.registry import adapters_for, library_of
from corp.errors import StorageError, warn
from corp.io.files import file_in, new_folder, read_json, refuse_existing, write_json, write_tensors
from corp.planning.plan import Plan
from corp.report.card import model_card
from corp.report.html import Run, page
from corp.steps.result import Result
from corp.storage.export import targets
from corp.storage.export.possible import Exports
from corp.storage.export.profiles import COMPAT, STANDARD
from corp.storage.export.record import Exported
from corp.storage.rebuilding import base_of, rebuild, shrink_all
from corp.storage.tying import assign, saved_state
from corp.surgery.apply import history, set_history
from corp.surgery.padded import ScatterLinear

FORMAT = "corp-model"
FORMAT_VERSION = 1
WEIGHTS, PLAN, MANIFEST, REPORT, CARD = "model.safetensors", "plan.json", "corp.json", "report.json", "README.md"
PAGE = "report.html"
COMPACT = "compact"
PROFILES = (COMPACT, STANDARD, COMPAT)


def save(
    result: Result,
    path: str | Path,
    *,
    profile: str = COMPACT,
    overwrite: bool = False,
    command: str | None = None,
    companions: Sequence[str | Path] = (),
) -> None:
    """Write the pruned model into the folder `path`: weights, plan, recipe, base model, report and a model card.

    The folder is written completely or not at all. A model that cannot be rebuilt from its name (a class of the
    user's own, unusual arguments) is saved too; loading it then needs the dense model: load(path, base=...).
    `command` is recorded as the command that made it. A transformers model gets tokenizer or preprocessing files from
    the first place that has any: `companions` (folders or hub ids), then where the dense model was.

    This is the profile "compact", which corp.load reads. The others do not need corp: they are written by the model's
    own library, read back with it and compared. "standard" states narrower MLPs in the config, and pads pruned queries
    and keys with zeros; "compat" pads everything to the dense shapes.
    """
    if not isinstance(result, Result):
        raise StorageError(f"corp.save takes the Result of prune or apply, not {type(result).__name__}")
    if profile not in PROFILES:
        raise StorageError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    sources = places_of([str(place) for place in companions], result.model, result.origin)
    if profile != COMPACT:
        origin = {"recipe": result.plan.recipe.to_dict(), "calibration": result.origin, "command": command}
        base = base_of(result.model)
        chosen = targets.choose(base, None, profile)
        with new_folder(Path(path), overwrite=overwrite) as folder:
            targets.write(result.model, base, folder, Path(path), chosen, sources, origin)
        return
    manifest = compact_manifest(result, path, command)
    with new_folder(Path(path), overwrite=overwrite) as folder:
        write_tensors(folder / WEIGHTS, _state(result.model), metadata={"format": "pt"})
        describe_result(result, folder, Path(path), manifest, sources)


def compact_manifest(result: Result, path: str | Path, command: str | None) -> dict[str, Any]:
    """The manifest of a result's folder; warns if it does not suffice to load the model."""
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "corp": __version__,
        "torch": torch.__version__,
        "base": base_of(result.model),
        "recipe": result.plan.recipe.to_dict(),
        "calibration": result.origin,
        "command": command,
        "earlier_plans": [plan.to_dict() for plan in history(result.model)[:-1]],
    }
    if manifest["base"] is None:
        warn(
            "corp does not know how to rebuild this model's dense architecture, so loading it needs the dense model: "
            f"corp.load({str(path)!r}, base=model)"
        )
    return manifest


def describe_result(result: Result, folder: Path, path: Path, manifest: dict[str, Any], sources: list[str]) -> None:
    """Write everything except the weights into `folder`, whose final name is `path`."""
    write_json(folder / MANIFEST, manifest)
    write_json(folder / REPORT, result.report.to_dict())
    result.plan.save(folder / PLAN)
    (folder / CARD).write_text(model_card(result.report, manifest), encoding="utf-8")
    name = path.resolve().name
    (folder / PAGE).write_text(page([Run(name, manifest, result.report)]), encoding="utf-8")
    for library in filter(None, (library_of(adapter.name) for adapter in adapters_for(result.model))):
        library.companions(sources, folder)


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    profile: str | None = None,
    quant: str | None = None,
    overwrite: bool = False,
    command: str | None = None,
) -> Exported:
    """Write the model of a compact folder in a format that does not need corp.

    `to` is "timm" or "hf" (the model's own library, the default; `profile` as for save), "onnx", "pt2", "vllm" or
    "gguf" (llama.cpp; `quant` is "f32", "f16", "bf16" or "q8_0", by default the model's own precision).
    """
    folder = Path(source)
    manifest = read_manifest(folder)
    chosen = targets.choose(manifest["base"], to, profile, quant)
    refuse_existing(Path(out), overwrite=overwrite)
    origin = {key: manifest.get(key) for key in ("recipe", "calibration")}
    origin["command"] = command
    model = load(folder)
    sources = places_of([str(folder)], model, manifest.get("calibration"))
    with new_folder(Path(out), overwrite=overwrite) as new:
        return targets.write(model, manifest["base"], new, Path(out), chosen, sources, origin, quant)


def exports(source: str | Path) -> dict[str, str | None]:
    """For every export target, why the model of a compact folder cannot be exported to it; None if it can."""
    folder = Path(source)
    manifest = read_manifest(folder)
    *earlier, last = read_plans(folder, manifest)
    with torch.device("meta"):
        model = rebuild(manifest["base"], folder)
    shrink_all(model, earlier)
    return Exports(model).of(last)


def places_of(given: list[str], model: nn.Module, calibration: Any) -> list[str]:
    """Places that may have tokenizer and preprocessing files: those given, then where the dense model was."""
    origin = calibration.get("model") if isinstance(calibration, dict) else None
    loaded_from = getattr(getattr(model, "config", None), "name_or_path", None)
    return [*given, *(place for place in (origin, loaded_from) if isinstance(place, str) and place)]


def load(path: str | Path, *, base: nn.Module | None = None) -> nn.Module:
    """Load a saved model, in eval mode on the CPU; its outputs are bit-identical to those before saving.

    `base` is the dense model (its weights do not matter), for models that cannot be rebuilt from their name.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    plans = read_plans(folder, manifest)
    weights = file_in(folder, WEIGHTS)
    if base is not None:
        model = copy.deepcopy(base)
    else:
        with torch.device("meta"):  # shapes are checked before anything is allocated
            model = rebuild(manifest["base"], folder)
    shrink_all(model, plans)
    tensors = _read_tensors(weights, model)
    if any(buffer.is_meta for name, buffer in model.named_buffers() if name not in tensors):
        model = rebuild(manifest["base"], folder)  # buffers that are not saved must be computed
        shrink_all(model, plans)
    set_history(model, plans)
    assign(model, tensors)
    odd = [name for name, m in model.named_modules() if isinstance(m, ScatterLinear) and not m.is_sound()]
    if odd:
        raise StorageError(f"{weights}: {odd[0]}.index does not say where its outputs belong")
    return model.eval()


def read_plans(folder: Path, manifest: dict[str, Any]) -> tuple[Plan, ...]:
    """All applied plans, first to last; the last is the folder's own."""
    earlier = manifest.get("earlier_plans", [])
    if not isinstance(earlier, list):
        raise StorageError(f"{folder / MANIFEST}: 'earlier_plans' is not a list")
    return (*map(Plan.from_dict, earlier), Plan.load(file_in(folder, PLAN)))


def read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder that corp saved")
    manifest = read_json(file_in(folder, MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StorageError(f"{folder / MANIFEST} does not describe a model saved by corp")
    if manifest.get("version") != FORMAT_VERSION:
        raise StorageError(
            f"{folder} has format version {manifest.get('version')!r}, this corp reads {FORMAT_VERSION}; "
            f"it was written by corp {manifest.get('corp')!r}"
        )
    if "base" not in manifest or not isinstance(manifest["base"], dict | None):
        raise StorageError(f"{folder / MANIFEST}: 'base' is not an object")
    return manifest


def _read_tensors(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the file, tied ones once, after checking their names, shapes and dtypes against `model`."""
    expected = saved_state(model)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for problem, odd in (("lacks", set(expected) - names), ("has unknown", names - set(expected))):
                if odd:
                    raise StorageError(f"{path} {problem} {len(odd)} tensor(s), such as {min(odd)!r}")
            for name, tensor in expected.items():
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(tensor.shape):
                    raise StorageError(f"{path}: {name} has shape {shape}, the model needs {tuple(tensor.shape)}")
            # Copies, because the file's memory is not aligned like torch's, and kernels would round differently.
            tensors = {name: file.get_tensor(name).clone() for name in expected}
    except SafetensorError as error:
        raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise StorageError(f"{path}: {name} is {tensor.dtype}, the model needs a kind of {expected[name].dtype}")
    return tensors


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, tied parameters once, with every tensor in separate memory, as safetensors requires."""
    seen: set[int] = set()
    state = {}
    for name, tensor in saved_state(model).items():
        own = tensor.detach().cpu().contiguous()
        state[name] = own.clone() if tensor.data_ptr() in seen else own
        seen.add(tensor.data_ptr())
    return state
