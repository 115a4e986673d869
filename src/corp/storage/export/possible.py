"""Which exports a plan or a recipe allows, found without data and before anything is pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from corp.adapters.registry import Adapter, Library, adapters_for, find_sites, library_of
from corp.errors import CorpError, StorageError
from corp.planning.linear import uses_intercept
from corp.planning.plan import Plan
from corp.planning.widths import width_of
from corp.recipe import SHARED, UNIFORM, Recipe
from corp.sites import AttentionSite, Sites, projection_at
from corp.storage.export.decoder import why_not
from corp.storage.export.formats import ONNX, PT2
from corp.storage.export.profiles import (
    COMPAT,
    LIBRARY_TARGETS,
    beyond_widths,
    holds_narrower_heads,
    refuse_biases,
)
from corp.storage.export.served import GGUF, VLLM
from corp.surgery.opened import opened

TRANSFORMERS = "transformers"
PROGRAMS = {TRANSFORMERS: "hf", VLLM: VLLM, GGUF: GGUF, ONNX: ONNX}  # what a recipe can be made for -> its target


class _Outcome(NamedTuple):
    """What decides where a pruned model can go."""

    widths: Mapping[str, int]  # of MLPs
    intercepts: frozenset[str]  # sites whose compensation needs a bias
    merged: bool  # tokens are merged
    factored: bool  # the output head is


def targets_for(model: nn.Module, plan: Plan) -> dict[str, str | None]:
    """For every target, why `model` pruned by `plan` cannot be exported to it; None where it can.

    The model's own library is "hf" or "timm" (the profile standard), "compat" the same padded to the dense shapes.
    """
    widths = {site.name: site.width for site in find_sites(model).mlp}
    widths |= {site.name: site.keep for site in plan.sites if site.kind == "mlp"}
    intercepts = frozenset(site.name for site in plan.sites if site.intercept)
    return _targets(model, _Outcome(widths, intercepts, plan.merging is not None, plan.output is not None))


def targets_under(model: nn.Module, recipe: Recipe) -> dict[str, str | None]:
    """The same for what the recipe may lead to, before there is a plan."""
    apart = opened(model)
    sites, narrower = find_sites(model), _narrower(model, recipe)
    widths = {site.name: narrower.get(site.name, site.width) for site in sites.mlp}
    if recipe.has_target and recipe.allocate != UNIFORM:  # they may all differ; that two do is enough
        widths |= {site.name: site.width for site in sites.mlp[:1]}
    intercepts = frozenset(
        site.name
        for site in sites
        if site.name in narrower
        and not isinstance(site, AttentionSite)
        and uses_intercept(recipe, projection_at(apart, site.down).bias is not None)
    )
    return _targets(model, _Outcome(widths, intercepts, recipe.tokens is not None, _may_factor(sites, recipe)))


def recipe_for(model: nn.Module, program: str, recipe: Recipe) -> Recipe:
    """The recipe with options that `program` ("transformers", "vllm", "gguf" or "onnx") can hold.

    For transformers all layers get one width. Heads get one width and the same rotary pairs; where the format has no
    narrower heads, a target leaves them alone. What still cannot be held is an error.
    """
    if program not in PROGRAMS:
        raise StorageError(f"{program!r} is not one of {', '.join(PROGRAMS)}")
    if program != ONNX:
        changes: dict[str, Any] = {"output": 0.0}
        if program == TRANSFORMERS:
            changes["allocate"] = UNIFORM
        if narrower_heads_fit(model, program):
            changes |= {"rotary": SHARED, "equal_heads": True}
        elif recipe.has_target:
            changes["overrides"] = {"*": {"attn": 0.0, "vo": 0.0}, **recipe.overrides}
        recipe = replace(recipe, **changes)
    reason = targets_under(model, recipe).get(PROGRAMS[program], f"it cannot hold a {type(model).__name__}")
    if reason:
        raise StorageError(f"{program}: {reason}")
    return recipe


def fits(model: nn.Module, program: str, recipe: Recipe) -> bool:
    """Whether `recipe_for` finds options that the program can hold."""
    return _reason(lambda: recipe_for(model, program, recipe)) is None


def narrower_heads_fit(model: nn.Module, program: str) -> bool:
    """Whether the program holds heads that are narrower, all alike, instead of padded ones."""
    adapter, identity = _identified(model)
    library, sites = library_of(adapter.name) if adapter else None, find_sites(model)
    if library is None or identity is None or not len(sites.attention) == len(sites.values) > 0:
        return False
    return why_not(model) is None if program in (VLLM, GGUF) else holds_narrower_heads(model, library, identity)


def pads_heads(model: nn.Module, target: str, recipe: Recipe) -> bool:
    """Whether the recipe narrows heads that come out padded in this target."""
    sites, narrower = find_sites(model), _narrower(model, recipe)
    if all(site.kind == "mlp" or site.name not in narrower for site in sites) or target in (ONNX, PT2):
        return False
    alike = recipe.equal_heads and (recipe.rotary == SHARED or not any(site.rotary for site in sites.attention))
    return target == COMPAT or not (alike and narrower_heads_fit(model, target))


def _narrower(model: nn.Module, recipe: Recipe) -> dict[str, int]:
    """The widths of the sites that the recipe narrows; under a target, half of them."""
    sites, asked = find_sites(model), recipe
    if recipe.has_target:
        even = recipe.allocate == UNIFORM and not recipe.equal_heads  # then values are left alone
        asked = recipe.with_shares(mlp=0.5, attn=0.5, vo=recipe.vo if even else 0.5)
    found = {site.name: (site.width, width_of(site, sites, asked)) for site in sites}
    return {name: keep for name, (width, keep) in found.items() if keep < width}


def _targets(model: nn.Module, outcome: _Outcome) -> dict[str, str | None]:
    adapter, identity = _identified(model)
    library = library_of(adapter.name) if adapter else None
    if adapter is None or library is None or identity is None:
        reason = "no library that corp writes for can rebuild this model from its name or config"
        return dict.fromkeys((COMPAT, ONNX, PT2, VLLM, GGUF), reason)
    biases, no_llama = _new_biases(model, outcome.intercepts), why_not(model)
    beyond = beyond_widths(outcome.merged, outcome.factored, "it")
    return {
        LIBRARY_TARGETS[library.name]: beyond
        or _reason(lambda: _standard(outcome.widths, adapter, library, identity, biases)),
        COMPAT: beyond or _reason(lambda: refuse_biases(biases, library, COMPAT)),
        ONNX: _missing("onnx", ONNX) or _missing("onnxscript", ONNX),
        PT2: None,
        VLLM: beyond or no_llama,
        GGUF: beyond or no_llama or _missing("gguf", GGUF),
    }


def _may_factor(sites: Sites, recipe: Recipe) -> bool:
    """Whether the output head may be factored: under a target that this can help with, unless the recipe says."""
    if sites.output is None or recipe.output is not None:
        return sites.output is not None and bool(recipe.output)
    helps = recipe.target_params is None or not sites.output.tied
    return recipe.has_target and recipe.searches and recipe.target_latency is None and helps


def _identified(model: nn.Module) -> tuple[Adapter | None, dict[str, Any] | None]:
    for adapter in adapters_for(model):
        if adapter.identify is not None and adapter.find(model) is not None:
            return adapter, adapter.identify(model)
    return None, None


def _new_biases(model: nn.Module, intercepts: frozenset[str]) -> set[str]:
    """The biases that compensation will make where the dense model has none."""
    sites, found = find_sites(model), set()
    for name in intercepts:
        site = sites.get(name)
        if site is not None and not isinstance(site, AttentionSite):
            found |= set() if projection_at(model, site.down).bias is not None else {f"{site.down}.bias"}
    return found


def _standard(
    widths: Mapping[str, int], adapter: Adapter, library: Library, identity: dict[str, Any], biases: set[str]
) -> None:
    resized = library.resize(identity, dict(widths), bool(biases))
    assert adapter.rebuild is not None
    with torch.device("meta"):
        target = adapter.rebuild(resized)
    refuse_biases(biases - set(target.state_dict()), library, "standard")


def _reason(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except StorageError as error:
        return str(error)
    except CorpError as error:
        return f"it cannot be rebuilt: {error}"
    return None


def _missing(package: str, extra: str) -> str | None:
    return None if find_spec(package) else f"{package} is not installed: pip install 'corp-prune[{extra}]'"
