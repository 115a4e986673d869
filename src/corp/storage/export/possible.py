"""Which exports a plan allows, found without data and before anything is pruned."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from corp.adapters.registry import Adapter, Library, adapters_for, find_sites, library_of
from corp.errors import CorpError, StorageError
from corp.planning.plan import Plan
from corp.sites import AttentionSite, projection_at
from corp.storage.export.decoder import why_not
from corp.storage.export.formats import ONNX, PT2
from corp.storage.export.profiles import COMPAT, LIBRARY_TARGETS, refuse_beyond_widths, refuse_biases
from corp.storage.export.served import GGUF, VLLM


def targets_for(model: nn.Module, plan: Plan) -> dict[str, str | None]:
    """For every target, why `model` pruned by `plan` cannot be exported to it; None where it can.

    The model's own library is "hf" or "timm" (the profile standard), "compat" the same padded to the dense shapes.
    """
    adapter, identity = _identified(model)
    library = library_of(adapter.name) if adapter else None
    if adapter is None or library is None or identity is None:
        reason = "no library that corp writes for can rebuild this model from its name or config"
        return dict.fromkeys((COMPAT, ONNX, PT2, VLLM, GGUF), reason)
    biases, no_llama = _new_biases(model, plan), why_not(model)
    beyond = _reason(lambda: refuse_beyond_widths([plan], "it"))
    return {
        LIBRARY_TARGETS[library.name]: beyond
        or _reason(lambda: _standard(model, plan, adapter, library, identity, biases)),
        COMPAT: beyond or _reason(lambda: refuse_biases(biases, library, COMPAT)),
        ONNX: _missing("onnx", ONNX) or _missing("onnxscript", ONNX),
        PT2: None,
        VLLM: beyond or no_llama,
        GGUF: beyond or no_llama or _missing("gguf", GGUF),
    }


def _identified(model: nn.Module) -> tuple[Adapter | None, dict[str, Any] | None]:
    for adapter in adapters_for(model):
        if adapter.identify is not None and adapter.find(model) is not None:
            return adapter, adapter.identify(model)
    return None, None


def _new_biases(model: nn.Module, plan: Plan) -> set[str]:
    """The biases that compensation will make where the dense model has none."""
    sites, found = find_sites(model), set()
    for planned in plan.sites:
        site = sites.get(planned.name)
        if planned.intercept and site is not None and not isinstance(site, AttentionSite):
            found |= set() if projection_at(model, site.down).bias is not None else {f"{site.down}.bias"}
    return found


def _standard(
    model: nn.Module, plan: Plan, adapter: Adapter, library: Library, identity: dict[str, Any], biases: set[str]
) -> None:
    widths = {site.name: site.width for site in find_sites(model).mlp}
    widths |= {site.name: site.keep for site in plan.sites if site.kind == "mlp"}
    resized = library.resize(identity, widths, bool(biases))
    assert adapter.rebuild is not None
    with torch.device("meta"):
        target = adapter.rebuild(resized)
    refuse_biases(biases - set(target.state_dict()), library, "standard")


def _reason(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except StorageError as error:
        return str(error)
    except CorpError as error:
        return f"it cannot be rebuilt: {error}"
    return None


def _missing(package: str, extra: str) -> str | None:
    return None if find_spec(package) else f"{package} is not installed: pip install 'corp-prune[{extra}]'"
