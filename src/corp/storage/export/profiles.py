"""The profiles of a saved model that need no corp to load: `standard` and `compat`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corp.adapters.registry import Library, adapter_named, find_sites, library_of
from corp.errors import StorageError
from corp.measure.cost import count_macs, count_params
from corp.storage.export.check import largest_difference, precise, require_agreement
from corp.storage.export.padding import pad
from corp.storage.export.record import Written
from corp.storage.export.rotary import (
    Heads,
    attentions,
    common_heads,
    longrope,
    rope_factors,
    static_rope,
    written_state,
)
from corp.storage.tying import assign
from corp.surgery.apply import history, set_history
from corp.surgery.merged import merge_tokens
from corp.surgery.norms import NarrowNorm

STANDARD, COMPAT = "standard", "compat"
Make: TypeAlias = Callable[[dict[str, Any]], nn.Module]
PROFILES = (STANDARD, COMPAT)
LIBRARY_TARGETS = {"timm": "timm", "transformers": "hf"}  # a library -> the name of its format here


def beyond(target: str, *, factored: bool, normed: bool) -> str | None:
    """Why `target` cannot store a factored output head, or heads narrowed under QK-norm; None without them."""
    if factored:
        what, remedy = "this model has a low-rank output head, which {} cannot hold", "output=0"
    elif normed:
        what = "heads are narrower under QK-norm, so their lengths are predicted, which {} cannot do"
        remedy = "attn=0"
    else:
        return None
    return f"{what.format(target)}; export to onnx or pt2, or prune with {remedy}"


def refuse_beyond(model: nn.Module, target: str) -> None:
    """Refuse what only corp's own folders, ONNX and PT2 can store."""
    normed = any(isinstance(module, NarrowNorm) for module in model.modules())
    if reason := beyond(target, factored=any(plan.output for plan in history(model)), normed=normed):
        raise StorageError(reason)


def without_merging(model: nn.Module, library: Library) -> tuple[nn.Module, tuple[str, ...]]:
    """The model without token merging, which no library's own format can store, and a note on what that costs."""
    plans = history(model)
    if not any(plan.merging for plan in plans):
        return model, ()
    plain = copy.deepcopy(model)
    for plan in plans:
        if plan.merging is not None:
            idle = replace(plan.merging, schedule=(0,) * len(plan.merging.schedule), read=None, unmerge=False)
            merge_tokens(plain, idle)
    set_history(plain, tuple(replace(plan, merging=None) for plan in plans))
    batch = library.example(model)
    before, after = (count_macs(one, batch) for one in (model, plain))
    note = (
        f"merged tokens are left out, because plain {library.name} cannot hold them: the model computes "
        f"{after / before:.2f} times the operations; export to onnx or pt2 to keep them"
    )
    return plain, (note,)


def holds_narrower_heads(model: nn.Module, width: int, library: Library, identity: dict[str, Any]) -> bool:
    """Whether the standard profile can express that all heads, `width` wide in the dense model, are narrower."""
    common = common_heads(model)
    if common is None:
        exact = precise(model) == next(model.parameters()).dtype  # see _one_head_width
        return exact and library.resize_heads(identity, width - 2, None) is not None
    rope = _rope(model, common._replace(width=common.width - 2, pairs=common.pairs[:-1]))
    return rope is not None and library.resize_heads(identity, common.width - 2, rope) is not None


def write_profile(
    model: nn.Module, base: dict[str, Any] | None, folder: Path, profile: str, sources: list[str]
) -> Written:
    """Write the pruned `model` into `folder` for its own library, read it back with that, and compare."""
    library, make = library_for(base)
    refuse_beyond(model, f"plain {library.name}")
    model, notes = without_merging(model, library)
    identity: dict[str, Any] = (base or {})["identity"]
    plans, biases, factor = history(model), _new_biases(model, _build(make, identity)), 1.0
    rotary: dict[str, Tensor] = {}  # attentions whose heads, all of one width, the config can express
    if profile == STANDARD:
        widths = {site.name: site.width for site in find_sites(model).mlp}
        identity = library.resize(identity, widths, bool(biases))
        said = {"mlp"}  # the config states their width, so they are not padded
        width, common = _one_head_width(model), common_heads(model)
        if common is not None and common.narrower:
            rope = _rope(model, common)
            heads = None if rope is None else library.resize_heads(identity, common.width, rope)
            rotary = {} if heads is None else written_state(model, common)
        else:
            heads = None if width is None else library.resize_heads(identity, width, None)
        if heads is not None:
            identity, factor = heads
            said |= {"attn", "vo"}
        plans = tuple(replace(plan, sites=tuple(s for s in plan.sites if s.kind not in said)) for plan in plans)
    target = _build(make, identity, "cpu")
    refuse_biases(set(biases) - set(target.state_dict()), library, profile)
    assign(target, {**pad(model, _build(make, identity), plans), **rotary})
    _scale_queries(target, factor)
    library.write(target.eval(), identity, folder)
    # Scaled queries are rounded once more than the pruned model's, which is visible in half precision.
    rounded = next(model.parameters()).dtype if rotary else precise(model)
    difference = largest_difference(model, library.read(identity, folder, precise(model)), library.example(model))
    require_agreement(difference, rounded)
    load = partial(library.call, identity)
    return Written(load, count_params(target), difference, library.companions(sources, folder), notes)


def _one_head_width(model: nn.Module) -> int | None:
    """The width that queries, keys and values of all attentions have, if there is one.

    None in half precision, where the factor that corrects the library's own temperature would be rounded.
    """
    sites = find_sites(model)
    widths = {site.width for site in sites.attention} | {site.width for site in sites.values}
    whole = len(widths) == 1 and len(sites.attention) == len(sites.values)
    narrowed = any(site.kind != "mlp" for plan in history(model) for site in plan.sites)
    return widths.pop() if whole and narrowed and precise(model) == next(model.parameters()).dtype else None


def _scale_queries(model: nn.Module, factor: float) -> None:
    if factor == 1.0:
        return
    for site in find_sites(model).attention:
        linear: Any = model.get_submodule(site.q.module)
        for parameter in (linear.weight, linear.bias):
            if parameter is not None:
                parameter.data = parameter.data.clone()  # it belongs to the pruned model
                parameter.data[site.q.index] *= factor


def _rope(model: nn.Module, heads: Heads) -> dict[str, Any] | None:
    """The rotary parameters of the kept pairs, if the library supports them: see rotary.longrope."""
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    rope = static_rope(config)
    if rope is None or rope.get("rope_type") == "yarn" or not hasattr(attentions(model).popitem()[1], "q_proj"):
        return None
    base = float(rope["rope_theta"])
    return longrope(base, rope_factors(model, heads, base), config["max_position_embeddings"])


def library_for(base: dict[str, Any] | None) -> tuple[Library, Make]:
    """The model's library, and how to build models of it."""
    adapter = (base or {}).get("adapter")
    library = library_of(str(adapter))
    if base is None or library is None or not isinstance(base.get("identity"), dict):
        what = "a model that cannot be rebuilt from its name or config" if base is None else f"models of {adapter}"
        raise StorageError(f"the profiles standard and compat do not know {what}; save it as profile='compact'")
    make = adapter_named(str(adapter)).rebuild
    assert make is not None
    return library, make


def _build(make: Make, identity: dict[str, Any], device: str = "meta") -> nn.Module:
    with torch.device(device):
        return make(identity)


def _new_biases(model: nn.Module, dense: nn.Module) -> list[str]:
    """Parameters that the dense architecture does not have: biases added by compensation."""
    known = set(dense.state_dict())
    return [name for name, _ in model.named_parameters() if name not in known]


def refuse_biases(biases: set[str], library: Library, profile: str) -> None:
    """Raise an error if compensation added biases that the profile cannot store."""
    if biases:
        other = " (the standard profile may hold it)" if profile == COMPAT else ""
        raise StorageError(
            f"compensation made {len(biases)} biases, such as {min(biases)}, which the model has no place for in "
            f"{library.name}{other}; prune it again with intercept=False, or keep profile='compact'"
        )
