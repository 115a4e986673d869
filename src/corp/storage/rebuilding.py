"""How to rebuild the architecture of a saved model: the dense one by its name, then narrowed by its plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.adapters.registry import adapter_named, adapters_for, find_sites
from corp.errors import CorpError, StorageError
from corp.planning.plan import Plan
from corp.storage.tying import tied_names
from corp.surgery.apply import history, shrink
from corp.surgery.experts import pack
from corp.surgery.opened import open_up


def rebuild(base: dict[str, Any] | None, folder: Path) -> nn.Module:
    """The dense architecture that the folder names, with arbitrary weights."""
    if base is None:
        raise StorageError(f"{folder} does not say how to build its dense model; pass it: corp.load(path, base=model)")
    adapter = adapter_named(str(base.get("adapter")))
    identity = base.get("identity")
    if adapter.rebuild is None or not isinstance(identity, dict):
        raise StorageError(f"{folder}: adapter {adapter.name!r} cannot rebuild it; pass corp.load(path, base=model)")
    return adapter.rebuild(identity)


def shrink_all(model: nn.Module, plans: Sequence[Plan]) -> None:
    """Narrow a dense model, whatever its weights, to its shapes after all plans."""
    open_up(model)
    for plan in plans:
        shrink(model, find_sites(model), plan)
    pack(model)


def base_of(model: nn.Module) -> dict[str, Any] | None:
    """How to rebuild the dense architecture, if that reproduces this model exactly; otherwise None."""
    for adapter in adapters_for(model):
        if adapter.identify is None or adapter.rebuild is None or adapter.find(model) is None:
            continue
        try:
            identity = adapter.identify(model)
            if identity is None:
                continue
            identity = json.loads(json.dumps(identity))  # as load will see it
            with torch.device("meta"):
                copy_ = adapter.rebuild(identity)
            shrink_all(copy_, history(model))
        except (CorpError, TypeError):
            continue
        if structure(copy_) == structure(model):
            return {"adapter": adapter.name, "identity": identity}
    return None


def structure(model: nn.Module) -> dict[str, Any]:
    """Classes, shapes and plain attributes of all modules: equal structures with equal weights are equal functions."""
    modules = {
        name: (type(module).__qualname__, {k: v for k, v in vars(module).items() if _plain(k, v)})
        for name, module in model.named_modules()
    }
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    return {"modules": modules, "shapes": shapes, "tied": tied_names(model)}


def _plain(name: str, value: object) -> bool:
    # name_or_path is where a transformers model was stored, not what it computes.
    return (
        name not in ("training", "name_or_path")
        and not name.startswith("_")
        and isinstance(value, int | float | str | tuple | None)
    )
