"""The registry of adapters, and the search for a model's sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from corp.adapters.account import account
from corp.adapters.output_head import find_output
from corp.adapters.search import search
from corp.calibration.batches import Forward
from corp.errors import CorpError, ModelError
from corp.sites import AttentionSite, Finding, Mask, MLPSite, Rows, Sites, ValueSite
from corp.surgery.opened import opened

Find: TypeAlias = Callable[[nn.Module], Iterable[Finding] | None]


@dataclass(frozen=True)
class Adapter:
    """`find` maps a model to its sites, or to None if it does not support the model.

    `identify` describes how to rebuild the model without its weights (plain JSON values), `rebuild` does so;
    without them a model can still be saved, but loading it needs a dense model from the user.
    """

    name: str
    find: Find
    identify: Callable[[nn.Module], dict[str, Any] | None] | None = None
    rebuild: Callable[[dict[str, Any]], nn.Module] | None = None


@dataclass(frozen=True)
class Library:
    """How a model is written so that its own library reads it, without corp.

    `resize(identity, widths, biases)` is the identity of a model whose MLP sites have these widths and, with `biases`,
    a bias at every second linear layer. `resize_heads(identity, width, rope)` is that of a model whose queries, keys
    and values are all this wide (`rope`: the parameters of rotary ones), and the factor for its queries that keeps
    the temperature; None if the library has no such models. `write(model, identity, folder)` and
    `read(identity, folder, dtype)` are the library's own. `example(model)` is a small batch to compare on.
    `companions(sources, folder)` copies a model's companion files (tokenizer, preprocessing) from the first source
    that has them. `call` is how users load it.
    """

    name: str
    resize: Callable[[dict[str, Any], dict[str, int], bool], dict[str, Any]]
    write: Callable[[nn.Module, dict[str, Any], Path], None]
    read: Callable[[dict[str, Any], Path, torch.dtype], nn.Module]
    example: Callable[[nn.Module], Any]
    companions: Callable[[list[str], Path], list[str]]
    call: Callable[[dict[str, Any], str], str]
    resize_heads: Callable[[dict[str, Any], int, dict[str, Any] | None], tuple[dict[str, Any], float] | None] = (
        lambda _identity, _width, _rope: None
    )


_registered: dict[str, Adapter] = {}
_built_in = {  # package of the model's class -> module with its ADAPTER
    "timm": "corp.adapters.timm_vit",
    "transformers": "corp.adapters.hf",
    **dict.fromkeys(("torch", "torchvision", "open_clip", "clip"), "corp.adapters.torch_attention"),
}
_libraries = {  # adapter -> module with its LIBRARY
    "timm": "corp.adapters.timm_export",
    "transformers": "corp.adapters.hf_export",
}


def register_adapter(
    name: str,
    find: Find,
    *,
    identify: Callable[[nn.Module], dict[str, Any] | None] | None = None,
    rebuild: Callable[[dict[str, Any]], nn.Module] | None = None,
) -> None:
    """Add support for a model family: `find(model)` returns its sites, or None for other models.

    Adapters registered later are tried first, before the built-in ones; registering a name again replaces it.
    """
    if not callable(find):
        raise ModelError(f"adapter {name!r}: find must be a function from a model to its sites, not {find!r}")
    _registered.pop(name, None)
    _registered[name] = Adapter(name, find, identify, rebuild)


def adapters_for(module: nn.Module) -> list[Adapter]:
    """The user's adapters, newest first, then the built-in one of the library of the class."""
    packages = dict.fromkeys(cls.__module__.partition(".")[0] for cls in type(module).__mro__)
    built_in = [adapter_named(package) for package in packages if package in _built_in]
    return [*reversed(_registered.values()), *built_in]


def adapter_named(name: str) -> Adapter:
    """The adapter `name`: one that the user registered, or the built-in one of that library."""
    if name in _registered:
        return _registered[name]
    if name not in _built_in:
        known = ", ".join([*_registered, *_built_in])
        raise ModelError(f"no adapter is called {name!r} (known: {known}); register it with corp.register_adapter")
    adapter: Adapter = import_module(_built_in[name]).ADAPTER
    return adapter


def library_of(adapter: str) -> Library | None:
    """How the models of the adapter are written for their own library, if that is known."""
    if adapter in _registered or adapter not in _libraries:
        return None
    library: Library = import_module(_libraries[adapter]).LIBRARY
    return library


def require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")


def find_sites(model: nn.Module, batch: Any = None, forward: Forward | None = None) -> Sites:
    """Return what can be pruned in `model`, and what was refused and why.

    Models of any library are searched by structure. Each site is verified on the model, with a small input made
    from the model itself and, if given, with `batch` (through `forward`). A model inside a larger module (a backbone
    under a head) is found too. Packed experts have the names that corp.surgery.experts gives them.
    """
    require_module(model)
    if hasattr(model, "_orig_mod"):
        raise ModelError("this model is compiled; give corp the model itself (._orig_mod) and compile the pruned one")
    model = opened(model)
    known = _known(model)
    found = search(model, known.found, known.theirs, batch, forward)
    if not found.sites and not found.refused:
        raise ModelError(
            f"no adapter knows {type(model).__module__}.{type(model).__qualname__}, and it has no repeated block "
            f"with an attention or an MLP that corp recognises. Register an adapter with "
            f"corp.register_adapter(name, find)"
        )
    names = [*known.names, *(["structure"] if not known.names else [])]
    sites, refused = found.sites, found.refused
    layers = account(model, sites, refused)
    output = find_output(model, sites)
    return Sites(sites, refused, ", ".join(dict.fromkeys(names)), output, layers, frozenset(found.proven))


@dataclass
class _Known:
    """What adapters report, their names, and the parts of the model that belong to a registered adapter alone."""

    found: list[Finding] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    theirs: list[str] = field(default_factory=list)


def _known(model: nn.Module) -> _Known:
    known = _Known()
    inside = None  # prefix of the last module that an adapter claimed
    for prefix, module in model.named_modules():
        if inside is not None and prefix.startswith(inside):
            continue
        for adapter in adapters_for(module):
            findings = _ask(adapter, module)
            if findings is not None:
                known.found += [_prefixed(finding, prefix) for finding in findings]
                known.names.append(adapter.name)
                inside = f"{prefix}." if prefix else ""
                known.theirs += [inside] if adapter.name in _registered else []
                break
    return known


def _ask(adapter: Adapter, module: nn.Module) -> list[Finding] | None:
    try:
        findings = adapter.find(module)
    except CorpError:
        raise
    except Exception as error:
        raise ModelError(f"adapter {adapter.name!r} failed on {type(module).__name__}: {error!r}") from error
    return None if findings is None else list(findings)


def _prefixed(finding: Finding, prefix: str) -> Finding:
    """The finding as seen from a module that contains the model under `prefix`."""
    if not prefix:
        return finding

    def at(rows: Rows) -> Rows:
        return replace(rows, module=under(rows.module))

    def told(mask: Mask | None) -> Mask | None:
        if mask is None:
            return None
        return replace(mask, module=under(mask.module), around=tuple(map(under, mask.around)))

    def under(name: str) -> str:
        return f"{prefix}.{name}" if name else prefix

    name = under(finding.name)
    if isinstance(finding, MLPSite):
        up = tuple(map(at, finding.up))
        down, between = under(finding.down), tuple(map(under, finding.between))
        return replace(finding, name=name, up=up, down=down, mask=told(finding.mask), between=between)
    if isinstance(finding, AttentionSite):
        q_mask, k_mask = told(finding.q_mask), told(finding.k_mask)
        norm = finding.norm and replace(finding.norm, q=under(finding.norm.q), k=under(finding.norm.k))
        return replace(finding, name=name, q=at(finding.q), k=at(finding.k), q_mask=q_mask, k_mask=k_mask, norm=norm)
    if isinstance(finding, ValueSite):
        down, attention, mask = under(finding.down), under(finding.attention), told(finding.mask)
        return replace(finding, name=name, v=at(finding.v), down=down, attention=attention, mask=mask)
    return replace(finding, name=name)
