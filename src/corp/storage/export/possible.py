"""Which exports a plan or a recipe allows, found without data and before anything is pruned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import nn

from corp.adapters.registry import Adapter, adapters_for, find_sites, library_of
from corp.errors import CorpError, StorageError
from corp.planning.linear import uses_intercept
from corp.planning.plan import Plan
from corp.planning.widths import width_of
from corp.recipe import SHARED, UNIFORM, Recipe
from corp.sites import AttentionSite, Sites, projection_at
from corp.storage.export.decoder import why_not
from corp.storage.export.formats import ONNX, PT2
from corp.storage.export.gguf_file import GGUF
from corp.storage.export.profiles import COMPAT, LIBRARY_TARGETS, beyond, holds_narrower_heads, refuse_biases
from corp.storage.export.vllm_folder import VLLM
from corp.surgery.opened import open_up

TRANSFORMERS, TIMM = "transformers", "timm"
# The programs that a recipe can be made for, and their targets.
PROGRAMS = {TRANSFORMERS: "hf", TIMM: TIMM, VLLM: VLLM, GGUF: GGUF, ONNX: ONNX}
Reasons: TypeAlias = dict[str, str | None]  # by target, why it is impossible; None if it is possible
Checks: TypeAlias = dict[str, Callable[[], str | None]]  # by target, what finds the reason; some build the model


class Exports:
    """The possible exports of a model under a plan or recipe; sites are given, or found on a copy without weights.

    Targets are the model's own library, "hf" or "timm" (the profile standard), "compat", the same padded to the dense
    shapes, and the others of `corp export --to`.
    """

    def __init__(self, model: nn.Module, sites: Sites | None = None) -> None:
        bare = {id(p): nn.Parameter(p.to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, dict(bare))  # tensors in the memo are not copied
        open_up(self.model)
        self.sites = find_sites(self.model) if sites is None else sites
        adapter, self.identity = _identified(model)
        self.library = library_of(adapter.name) if adapter else None
        self.rebuild = adapter.rebuild if adapter else None

    def of(self, plan: Plan) -> Reasons:
        """The export targets of the model pruned by `plan`."""
        widths = {site.name: site.width for site in self.sites.mlp}
        widths |= {site.name: site.keep for site in plan.sites if site.kind == "mlp"}
        intercepts = {site.name for site in plan.sites if site.intercept}
        normed = self._normed(site.name for site in plan.sites)
        return _found(self._checks(widths, intercepts, plan.output is not None, normed))

    def under(self, recipe: Recipe) -> Reasons:
        """The export targets of the models that the recipe may lead to, before there is a plan."""
        return _found(self._checks_under(recipe))

    def _checks_under(self, recipe: Recipe) -> Checks:
        narrower = self._narrower(recipe)
        widths = {site.name: narrower.get(site.name, site.width) for site in self.sites.mlp}
        if recipe.has_target and recipe.allocate != UNIFORM:  # all may differ; two different ones are enough here
            widths |= {site.name: site.width for site in self.sites.mlp[:1]}
        intercepts = {
            site.name
            for site in self.sites
            if site.name in narrower
            and not isinstance(site, AttentionSite)
            and uses_intercept(recipe, projection_at(self.model, site.down).bias is not None)
        }
        return self._checks(widths, intercepts, self._may_factor(recipe), self._normed(narrower))

    def recipe_for(self, program: str, recipe: Recipe) -> Recipe:
        """The recipe with options that `program` ("transformers", "timm", "vllm", "gguf" or "onnx") supports.

        For transformers and timm all layers get one width, and tokens are not merged. Heads get one width and the
        same rotary pairs; if the format has no narrower heads, a target does not prune them. Anything else that the
        program does not support is an error.
        """
        if program not in PROGRAMS:
            raise StorageError(f"{program!r} is not one of {', '.join(PROGRAMS)}")
        if program != ONNX:
            changes: dict[str, Any] = {"output": 0.0}
            if program in (TRANSFORMERS, TIMM):
                changes |= {"allocate": UNIFORM, "tokens": None}
            if self._holds_heads(PROGRAMS[program]):
                changes |= {"rotary": SHARED, "equal_heads": True}
            elif recipe.has_target:
                changes["overrides"] = {"*": {"attn": 0.0, "vo": 0.0}, **recipe.overrides}
            recipe = replace(recipe, **changes)
        check = self._checks_under(recipe).get(PROGRAMS[program])
        reason = f"it cannot hold a {type(self.model).__name__}" if check is None else check()
        if reason:
            raise StorageError(f"{program}: {reason}")
        return recipe

    def fits(self, program: str, recipe: Recipe) -> bool:
        """Whether there are options that the program supports."""
        return _reason(lambda: self.recipe_for(program, recipe)) is None

    def pads_heads(self, target: str, recipe: Recipe) -> bool:
        """Whether the recipe narrows heads that are padded in this target."""
        narrower = self._narrower(recipe)
        if target in (ONNX, PT2) or all(site.kind == "mlp" or site.name not in narrower for site in self.sites):
            return False
        rotated = any(site.rotary for site in self.sites.attention)
        alike = recipe.equal_heads and (recipe.rotary == SHARED or not rotated)
        return target == COMPAT or not (alike and self._holds_heads(target))

    def _holds_heads(self, target: str) -> bool:
        """Whether the target supports narrower heads of one width."""
        if not len(self.sites.attention) == len(self.sites.values) > 0 or any(s.norm for s in self.sites.attention):
            return False
        return why_not(self.model) is None if target in (VLLM, GGUF) else self._library_holds_heads

    @cached_property
    def _library_holds_heads(self) -> bool:
        if self.library is None or self.identity is None:
            return False
        return holds_narrower_heads(self.model, self.sites.attention[0].width, self.library, self.identity)

    def _narrower(self, recipe: Recipe) -> dict[str, int]:
        """The widths of the sites that the recipe narrows; under a target, half of them."""
        asked = recipe
        if recipe.has_target:
            even = recipe.allocate == UNIFORM and not recipe.equal_heads  # then values are not pruned
            asked = recipe.with_shares(mlp=0.5, attn=0.5, vo=recipe.vo if even else 0.5)
        found = {site.name: (site.width, width_of(site, self.sites, asked)) for site in self.sites}
        return {name: keep for name, (width, keep) in found.items() if keep < width}

    def _may_factor(self, recipe: Recipe) -> bool:
        """Whether the output head may be factored: if the recipe says so, or under a target that this helps."""
        head = self.sites.output
        if head is None or recipe.output is not None:
            return head is not None and bool(recipe.output)
        helps = recipe.target_params is None or not head.tied
        return recipe.has_target and recipe.searches and recipe.target_latency is None and helps

    def _normed(self, names: Iterable[str]) -> bool:
        """Whether heads under QK-norm are among these sites."""
        normed = {site.name for site in self.sites.attention if site.norm is not None}
        return not normed.isdisjoint(names)

    def _checks(self, widths: Mapping[str, int], intercepts: set[str], factored: bool, normed: bool) -> Checks:
        """The checks by target, from widths of MLPs, sites whose compensation needs a bias, output head, QK-norm."""
        library = self.library
        if library is None or self.identity is None:
            reason = "no library that corp writes for can rebuild this model from its name or config"
            return dict.fromkeys((COMPAT, ONNX, PT2, VLLM, GGUF), lambda: reason)
        biases, no_llama = self._new_biases(intercepts), why_not(self.model)
        other = beyond("it", factored=factored, normed=normed)
        return {
            LIBRARY_TARGETS[library.name]: lambda: other or _reason(lambda: self._standard(widths, biases)),
            COMPAT: lambda: other or _reason(lambda: refuse_biases(biases, library, COMPAT)),
            ONNX: lambda: _missing("onnx", ONNX) or _missing("onnxscript", ONNX),
            PT2: lambda: None,
            VLLM: lambda: no_llama or other,
            GGUF: lambda: no_llama or other or _missing("gguf", GGUF),
        }

    def _new_biases(self, intercepts: set[str]) -> set[str]:
        """The biases that compensation will add to the dense model."""
        pruned = [site for site in self.sites if site.name in intercepts and not isinstance(site, AttentionSite)]
        return {f"{site.down}.bias" for site in pruned if projection_at(self.model, site.down).bias is None}

    def _standard(self, widths: Mapping[str, int], biases: set[str]) -> None:
        assert self.library is not None
        assert self.identity is not None
        assert self.rebuild is not None
        resized = self.library.resize(self.identity, dict(widths), bool(biases))
        if not biases:
            return
        with torch.device("meta"):
            target = self.rebuild(resized)
        refuse_biases(biases - set(target.state_dict()), self.library, "standard")


def _found(checks: Checks) -> Reasons:
    return {target: check() for target, check in checks.items()}


def _identified(model: nn.Module) -> tuple[Adapter | None, dict[str, Any] | None]:
    for adapter in adapters_for(model):
        if adapter.identify is not None and adapter.find(model) is not None:
            return adapter, adapter.identify(model)
    return None, None


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
