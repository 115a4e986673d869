"""Models by the names that users give, with their tokenizer, preprocessing and device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from corp.cli.console import note
from corp.errors import CorpError, DataError, ModelError, first_line
from corp.io.files import read_json
from corp.storage import folder as storage

HF = "hf:"
CAUSAL, ENCODER, IMAGE, OTHER = "causal", "encoder", "image", "other"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The checkpoint's dtype of every model that was cast.
_checkpoint_dtype: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()


def load_model(name: str, weights: Path | None, *, pretrained: bool = True, any_size: bool = False) -> nn.Module:
    """The model for a name: hf:FOLDER or hf:HUB-ID, a folder that corp saved, or a timm name."""
    where = _hf_place(name)
    if weights is not None and (where or Path(name).is_dir()):
        raise ModelError(f"{name} comes with its own weights; leave out --weights")
    if where:
        from corp.adapters import hf_models  # transformers is imported only if one of its models is needed

        return hf_models.create(where, pretrained=pretrained)
    if Path(name).is_dir() and not _timm_export(Path(name)):
        return storage.load(name)
    from corp.adapters import timm_models  # timm likewise

    if Path(name).is_dir():
        return timm_models.from_folder(Path(name))

    timm_models.require_known(name)
    if weights is None and pretrained:
        note(f"{name}: using timm's pretrained weights (--weights FILE uses a file)")
    return timm_models.create(name, weights, pretrained=pretrained, any_size=any_size)


def _hf_place(name: str) -> str | None:
    """The folder or hub id that transformers loads, if it is one: after hf:, or a folder that corp did not write."""
    if name.startswith(HF):
        where = name.removeprefix(HF)
        if not where:
            raise ModelError("hf: takes a folder or a hub id, e.g. hf:opt-125m/ or hf:owner/name")
        return str(Path(where).expanduser()) if where.startswith("~") else where
    folder = Path(name)
    foreign = (folder / "config.json").is_file() and not (folder / storage.MANIFEST).is_file()
    return name if foreign and not _timm_export(folder) else None


def _timm_export(folder: Path) -> bool:
    """Whether timm's local-dir: loads the folder: its config has an architecture, transformers' a model_type."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    return isinstance(config, dict) and isinstance(config.get("architecture"), str) and "model_type" not in config


def kind_of(model: nn.Module) -> str:
    """The kind of a model, CAUSAL, ENCODER, IMAGE or OTHER; models from outside transformers take images."""
    if not _of_transformers(model):
        return IMAGE
    from corp.adapters import hf_models

    return hf_models.kind_of(model)


def classes_of(model: nn.Module) -> int | None:
    """The number of classes of an image model: 0 for a backbone, None if unknown."""
    if _of_transformers(model):
        from corp.adapters import hf_models

        return hf_models.classes(model)
    count = getattr(model, "num_classes", None)
    return count if isinstance(count, int) else None


def _of_transformers(model: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__)


def tokenizer_of(name: str, given: str | None) -> Any:
    """The tokenizer that was given, or the model's own."""
    from corp.adapters import hf_models

    if given is not None:
        return hf_models.tokenizer(given.removeprefix(HF))
    return hf_models.tokenizer(_home(name, hf_models.TOKENIZER_FILES, "give its folder with --tokenizer"))


def preprocessing_of(name: str, model: nn.Module) -> Callable[..., Any]:
    """The image preprocessing that belongs to the model."""
    if not _of_transformers(model):
        from corp.adapters import timm_models

        return timm_models.preprocessing(model)
    from corp.adapters import hf_models

    return hf_models.preprocessing(_home(name, hf_models.PREPROCESSING_FILES, "put it there"))


def companion_places(name: str, model: nn.Module, tokenizer: str | None) -> list[str]:
    """Where a model's tokenizer or image preprocessing may be, beginning with the given place."""
    given = [] if tokenizer is None or kind_of(model) == IMAGE else [tokenizer]
    return [*given, name, *([origin] if (origin := _origin(Path(name))) else [])]


def lacking_companions(model: nn.Module, out: Path) -> str | None:
    """A sentence about the files that a pruned copy of the model, saved in `out`, lacks; None if it is complete."""
    if not _of_transformers(model):
        return None
    from corp.adapters import hf_models

    images = kind_of(model) == IMAGE
    files = hf_models.PREPROCESSING_FILES if images else hf_models.TOKENIZER_FILES
    if any((out / file).is_file() for file in files):
        return None
    remedy = "put one there" if images else "put one there, or give its folder with --tokenizer"
    return f"{out} has no {files[0]}, because the model has none; {remedy}"


def _home(name: str, files: tuple[str, ...], remedy: str) -> str:
    """Where a model's companion files are: with it, or with the model from which it was pruned."""
    where = _hf_place(name)
    if where:
        return where
    folder = Path(name)
    if any((folder / file).is_file() for file in files):
        return str(folder)
    origin = _origin(folder)
    if not origin or _hf_place(origin) is None:
        raise DataError(f"{name} has no {' or '.join(files[:2])}; {remedy}")
    return str(_hf_place(origin))


def _origin(folder: Path) -> str:
    """The model from which a folder was pruned, or an empty string if that is not recorded."""
    try:
        return str(storage.read_manifest(folder)["calibration"].get("model", ""))
    except (CorpError, KeyError, AttributeError):
        return ""


def chosen_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the model, except for buffers that are computed, not saved: rotary frequencies lose too much in bfloat16."""
    computed = {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None
    }
    before = next(model.parameters()).dtype
    model.to(dtype)
    for (module, name), buffer in computed.items():
        module._buffers[name] = buffer
    _checkpoint_dtype.setdefault(model, before)
    return model


def as_stored(model: nn.Module, dense: nn.Module) -> nn.Module:
    """Cast a pruned model back to the dtype of its checkpoint, if --dtype widened the dense one.

    Pruning in float32 is more exact; weights that were bfloat16 before should not take twice the space after it.
    """
    stored = _checkpoint_dtype.get(dense)
    narrower = stored is not None and stored.itemsize < next(model.parameters()).dtype.itemsize
    return _cast(model, stored) if stored is not None and narrower else model


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise ModelError(f"--device {name} is not a device; give cpu, cuda, cuda:1, mps or auto") from None


def place(model: nn.Module, device: str, dtype: str) -> nn.Module:
    """Move the model to the device and cast it to the dtype; auto leaves it in its own."""
    device = chosen_device(device)
    try:
        model = model.to(_device(device))
        return model if dtype == "auto" else _cast(model, DTYPES[dtype])
    except (RuntimeError, AssertionError) as error:  # torch has no exception class for "no such device"
        raise ModelError(f"--device {device} cannot be used here: {first_line(error)}") from error
