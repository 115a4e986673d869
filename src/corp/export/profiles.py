"""The profiles of a saved model that need no corp to load: `standard` and `compat`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.adapters.registry import Library, adapter_named, find_sites, library_of
from corp.api import history
from corp.errors import StorageError
from corp.export.check import largest_difference, precise, require_agreement
from corp.export.padding import pad
from corp.export.record import Exported, write_record
from corp.measure.cost import count_params
from corp.tying import assign

STANDARD, COMPAT = "standard", "compat"
PROFILES = (STANDARD, COMPAT)
LIBRARY_TARGETS = {"timm": "timm", "transformers": "hf"}  # a library -> what its format is called here


def write_profile(
    model: nn.Module,
    base: dict[str, Any] | None,
    folder: Path,
    path: Path,
    profile: str,
    sources: list[str],
    record: dict[str, Any],
) -> Exported:
    """Write the pruned `model` into `folder` for its own library, read it back with that, and compare.

    `base` is how its dense architecture is rebuilt; `path` is what the folder will be called. Tokenizer and
    preprocessing come from the first of `sources` that has them.
    """
    library, rebuild = library_for(base)
    identity: dict[str, Any] = (base or {})["identity"]
    plans, biases = history(model), _new_biases(model, rebuild(identity))
    if profile == STANDARD:
        widths = {site.name: site.width for site in find_sites(model).mlp}
        identity = library.resize(identity, widths, bool(biases))
        # Their config says the width: nothing to pad there.
        plans = tuple(replace(plan, sites=tuple(s for s in plan.sites if s.kind != "mlp")) for plan in plans)
    target = rebuild(identity, meta=False)
    _refuse(set(biases) - set(target.state_dict()), library, profile)
    assign(target, pad(model, rebuild(identity), plans))
    library.write(target.eval(), identity, folder)
    difference = _check(model, library, identity, folder)
    made = Exported(
        LIBRARY_TARGETS[library.name],
        profile,
        library.name,
        library.call(identity, str(path)),
        (count_params(model), count_params(target)),
        difference,
        tuple(library.companions(sources, folder)),
    )
    # The folder may move: on record is its name alone.
    name = path.resolve().name
    write_record(folder, name, replace(made, load=library.call(identity, name)), record, history(model))
    return made


def _check(model: nn.Module, library: Library, identity: dict[str, Any], folder: Path) -> float:
    reread = library.read(identity, folder, precise(model))
    difference = largest_difference(model, reread, library.example(model))
    require_agreement(difference, precise(model))
    return difference


class _Rebuild:
    """The dense architecture, on the meta device unless told otherwise."""

    def __init__(self, make: Callable[[dict[str, Any]], nn.Module]) -> None:
        self.make = make

    def __call__(self, identity: dict[str, Any], *, meta: bool = True) -> nn.Module:
        with torch.device("meta" if meta else "cpu"):
            return self.make(identity)


def library_for(base: dict[str, Any] | None) -> tuple[Library, _Rebuild]:
    adapter = (base or {}).get("adapter")
    library = library_of(str(adapter))
    if base is None or library is None or not isinstance(base.get("identity"), dict):
        what = "a model that cannot be rebuilt from its name or config" if base is None else f"models of {adapter}"
        raise StorageError(f"the profiles standard and compat do not know {what}; save it as profile='compact'")
    make = adapter_named(str(adapter)).rebuild
    assert make is not None
    return library, _Rebuild(make)


def _new_biases(model: nn.Module, dense: nn.Module) -> list[str]:
    """Parameters that the dense architecture has not: biases that compensation made."""
    known = set(dense.state_dict())
    return [name for name in model.state_dict() if name not in known]


def _refuse(biases: set[str], library: Library, profile: str) -> None:
    if biases:
        other = " (the standard profile may hold it)" if profile == COMPAT else ""
        raise StorageError(
            f"compensation made {len(biases)} biases, such as {min(biases)}, which the model has no place for in "
            f"{library.name}{other}; prune it again with intercept=False (--intercept no), or keep profile='compact'"
        )
