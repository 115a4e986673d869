"""Carry out a plan: narrower modules with the compensation folded in, in a copy of the model or in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from corp.calibration.statistics import Statistics
from corp.errors import PlanError
from corp.io.observer import timed
from corp.numerics import values
from corp.numerics.output import LowRank
from corp.planning.output import OutputPlan, fold_output, spectrum_of
from corp.planning.plan import Plan
from corp.planning.planners import fold_site
from corp.planning.site_plan import Fold, HeadMaps, LinearFold, SitePlan
from corp.sites import (
    AttentionSite,
    MLPSite,
    OutputHead,
    Site,
    Sites,
    ValueSite,
    at_site,
    heads_of,
    module_of,
    projection_at,
)
from corp.surgery.attention import Parts, narrow_queries, narrow_values, replace_attention
from corp.surgery.dispatch import undispatched
from corp.surgery.linear import shrink_down, shrink_mlp
from corp.surgery.merged import merge_tokens
from corp.surgery.output import replace_output
from corp.surgery.stand_in import sharing_copy

Planned: TypeAlias = tuple[Site, SitePlan]

# The plans by which a model was pruned. Not an attribute of the model, which belongs to the user.
_plans: WeakKeyDictionary[nn.Module, tuple[Plan, ...]] = WeakKeyDictionary()


def history(model: nn.Module) -> tuple[Plan, ...]:
    """The plans by which this model was pruned, first to last: enough to rebuild its shapes."""
    return _plans.get(model, ())


def set_history(model: nn.Module, plans: tuple[Plan, ...]) -> None:
    _plans[model] = plans


def narrowed_copy(model: nn.Module, sites: Sites, plan: Plan, stats: Statistics, within: str = "") -> nn.Module:
    """A smaller model whose module `within`, by default all of it, shares no memory with the dense one."""
    smaller = narrowed_shell(model, sites, plan, stats)
    shared = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    part = smaller.get_submodule(within)
    still = {id(tensor): tensor for tensor in chain(part.parameters(), part.buffers()) if id(tensor) in shared}
    own = {key: copy.deepcopy(tensor) for key, tensor in still.items()}  # each once: tied ones stay tied
    places: Any = [tensors for module in part.modules() for tensors in (module._parameters, module._buffers)]
    for tensors in places:
        tensors.update({name: own[id(tensor)] for name, tensor in tensors.items() if id(tensor) in own})
    return smaller


def narrowed_shell(model: nn.Module, sites: Sites, plan: Plan, stats: Statistics) -> nn.Module:
    """A smaller model for trials, which shares all tensors that the plan does not change with the dense one."""
    smaller = sharing_copy(model)
    with undispatched(smaller):
        for group in match(sites, plan):
            with at_site(group[0][0]), timed("compensate"):
                folds = [one.fold or fold_site(model, site, one, stats, plan.recipe) for site, one in group]
                apply_group(smaller, group, folds)
        if plan.output is not None:
            head = match_output(sites, plan.output)
            fold = plan.output.fold or _fold_output(model, head, plan.output, stats)
            replace_output(smaller, head, plan.output.keep, fold)
    return smaller


def _fold_output(model: nn.Module, head: OutputHead, plan: OutputPlan, stats: Statistics) -> LowRank:
    linear, moments = projection_at(model, head.name), stats.moments_of(head.name).total()
    return fold_output(plan.keep, linear, moments, spectrum_of(linear, moments))


def shrink(model: nn.Module, sites: Sites, plan: Plan) -> None:
    """Give `model`, in place, the shapes of the plan without compensation, ready for saved weights."""
    for group in match(sites, plan):
        apply_group(model, group, [None] * len(group))
    if plan.output is not None:
        replace_output(model, match_output(sites, plan.output), plan.output.keep, None)
    if plan.merging is not None:
        merge_tokens(model, plan.merging)


def apply_group(model: nn.Module, group: Sequence[Planned], folds: Sequence[Fold | None]) -> None:
    """Narrow, in place, the sites of one module: an MLP, or an attention's queries and keys, values or both."""
    parts: Parts = {}
    for (site, site_plan), fold in zip(group, folds, strict=True):
        kept = site_plan.indices()
        if isinstance(site, AttentionSite):
            assert not isinstance(fold, LinearFold)
            parts |= narrow_queries(model, site, kept, fold)
            continue
        assert not isinstance(fold, HeadMaps)
        folded = None if fold is None else fold.folded
        bias = site_plan.intercept or projection_at(model, site.down).bias is not None
        if isinstance(site, MLPSite):
            shrink_mlp(model, site, kept[0], folded, bias=bias)
            continue
        parts |= narrow_values(model, site, kept, fold.maps if fold else ())
        shrink_down(model, site, values.kept_inputs(kept, site.width, site.heads), folded, bias=bias)
    first = group[0][0]
    if isinstance(first, AttentionSite | ValueSite):
        replace_attention(model, first, parts)


def match_output(sites: Sites, plan: OutputPlan) -> OutputHead:
    head = sites.output
    if head is None or (head.name, head.inputs) != (plan.name, plan.width):
        raise PlanError(
            f"the plan has an output head {plan.name!r} of width {plan.width}, but this model has no such head"
        )
    return head


def match(sites: Sites, plan: Plan) -> list[list[Planned]]:
    """Every planned site of this model, grouped by module; a plan for another model is refused."""
    groups: dict[str, list[Planned]] = {}
    for site_plan in plan.sites:
        site = sites.get(site_plan.name)
        if site is None or site.kind != site_plan.kind:
            raise PlanError(f"the plan has a {site_plan.kind} site {site_plan.name!r}, but this model has no such site")
        heads = heads_of(site) or 1
        if (site.width, heads) != (site_plan.width, len(site_plan.kept)):
            planned = f"{len(site_plan.kept)} x {site_plan.width}"
            raise PlanError(f"{site.name}: the plan is for {planned}, the model has {heads} x {site.width}")
        groups.setdefault(module_of(site), []).append((site, site_plan))
    return list(groups.values())
