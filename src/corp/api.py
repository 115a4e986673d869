"""calibrate, plan, apply, repair and prune: the only loops over sites, but for sequential fitting."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.adapters.registry import find_sites
from corp.allocation.allocate import Shared, Sharing
from corp.calibration import workers
from corp.calibration.batches import Forward, evaluating, example, move, placement
from corp.calibration.job import Job, Progress, Settings
from corp.calibration.statistics import Statistics
from corp.errors import ModelError, PlanError, StatisticsError
from corp.measure.cost import count_macs, count_params
from corp.observer import stage
from corp.planning.heads import HeadSums, plan_attention
from corp.planning.linear import plan_mlp, plan_values
from corp.planning.overfitting import warn_if_weak
from corp.planning.plan import Plan, SitePlan
from corp.recipe import Recipe
from corp.refit.repair import Repair, record_batches, require_sequential, settled
from corp.report.tables import Report
from corp.sites import AttentionSite, MLPSite, Site, Sites, at_site, heads_of, module_of, projection_at
from corp.surgery.folding import Planned, apply_sites
from corp.surgery.self_check import require_agreement, verify


@dataclass(frozen=True)
class Result:
    """A smaller model, what was done to get it, and what that is predicted to cost."""

    model: nn.Module
    plan: Plan
    report: Report
    origin: dict[str, Any] = field(default_factory=dict)  # of the calibration: model, data, preprocessing, versions


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    origin: dict[str, Any] | None = None,
    announce: Callable[[str], None] | None = None,
) -> Statistics:
    """Run the dense model over `batches` and keep the sums that every later decision needs.

    A batch is a tensor (model(x)), a dict (model(**x)), or a tuple or list of which only the first element
    is used; anything else goes through forward(model, batch). Nothing of the data itself is kept.

    With `out` the sums go to that folder: a killed run continues when called again, and sums larger than memory
    are taken in several passes (`batches` must then be iterable more than once). Under torch.distributed every
    process takes its share of the batches. `settings` says how many tokens, how much memory; `origin` is a
    record of where model and data came from.
    """
    job = Job(
        model,
        list(find_sites(model)),
        batches,
        settings or Settings(),
        dict(origin or {}),
        fingerprint(model),
        forward,
        progress,
        announce,
        workers.current(),
    )
    with evaluating(model):
        return job.run(None if out is None else Path(out))


def plan(
    model: nn.Module,
    stats: Statistics,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Plan:
    """Decide what every site keeps and predict what that costs. Touches neither data nor the model.

    `shared` are widths that were chosen already, by a search that had data.
    """
    _require_recipe(recipe)
    _refuse_sequential(recipe)
    sites = find_sites(model)
    _require_same_weights(model, {"statistics": stats.weights})
    require_prunable(sites, recipe)
    widths, why = Sharing(model, sites, stats).share(recipe) if shared is None else shared
    planned = []
    for site in sites:
        keep = widths[site.name]
        if keep < site.width:
            with at_site(site):
                planned.append(_plan_site(model, site, keep, stats, recipe))
            if progress:
                progress(1)
    warn_if_weak(planned, stats)
    return Plan(recipe, tuple(planned), stats.weights, stats.samples, why)


def apply(model: nn.Module, stats: Statistics, plan: Plan) -> Result:
    """Shrink a copy of `model` to the plan and fold the compensation in; the model itself is left as it was."""
    _refuse_sequential(plan.recipe)
    _require_same_weights(model, {"statistics": stats.weights, "plan": plan.weights})
    smaller = compensated_copy(model, stats, plan)
    require_agreement(verify(model, smaller, stats, plan))
    return _result(model, smaller, stats, plan)


def compensated_copy(model: nn.Module, stats: Statistics, plan: Plan) -> nn.Module:
    """The smaller model alone."""
    smaller = copy.deepcopy(model)
    for group in match(find_sites(model), plan):
        with at_site(group[0][0]), stage("compensate"):
            apply_sites(smaller, group, stats, plan.recipe)
    return smaller


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe,
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> Result:
    """calibrate, plan and apply in a row, and nothing else; a sequential recipe reads some of the data once more."""
    _require_recipe(recipe)
    sites = find_sites(model)
    require_prunable(sites, recipe)  # a request that cannot be met fails before the data pass, not after it
    recipe = settled(model, sites, recipe, batches, forward)
    stats = calibrate(model, batches, forward=forward, progress=progress)
    result = apply(model, stats, plan(model, stats, recipe.at_once()))
    return repair(model, result, batches, recipe, forward=forward) if recipe.sequential else result


def repair(
    model: nn.Module,
    result: Result,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> Result:
    """Sequential fitting of what was pruned: block after block, on some of the data; `progress` counts blocks.

    `model` is the dense one. Widths stay as they are; layers that were not pruned make up for others too, unless the
    recipe skips them. Costs in the plan remain those of each site alone, on the dense model's inputs.
    """
    recipe = replace(result.plan.recipe if recipe is None else recipe, sequential=True)
    _require_same_weights(model, {"plan": result.plan.weights})
    sites = find_sites(model)
    blocks = require_sequential(model, sites, recipe, batches, forward)
    passages = record_batches(model, sites, batches, blocks, recipe, result.plan.samples, forward)
    work = Repair(model, copy.deepcopy(result.model), recipe)
    with stage("repair"):
        work.run(blocks, passages, progress)
    samples = sum(passage.samples for passage in passages)
    record = {"samples": samples, "read": {block.name: block.read for block in blocks if block.ends}}
    why = {**result.plan.why, "sequential": {**record, "layers": work.corrected}}
    made = replace(result.plan, recipe=recipe, why=why)
    set_history(work.smaller, (*history(model), made))
    return replace(result, model=work.smaller, plan=made, report=replace(result.report, plan=made))


def shrink(model: nn.Module, plan: Plan) -> None:
    """Give `model` (in place) the shapes of the plan, without compensation: the frame that saved weights go into."""
    for group in match(find_sites(model), plan):
        apply_sites(model, group, None, plan.recipe)


def history(model: nn.Module) -> tuple[Plan, ...]:
    """The plans that made this model out of a dense one, first to last: what rebuilding its shapes takes."""
    plans: tuple[Plan, ...] = getattr(model, "_corp_history", ())
    return plans


def set_history(model: nn.Module, plans: tuple[Plan, ...]) -> None:
    model._corp_history = plans  # type: ignore[assignment]


def match(sites: Sites, plan: Plan) -> list[list[Planned]]:
    """Every planned site with its place in this model, those of one module together; a plan for another is refused."""
    groups: dict[str, list[Planned]] = {}
    for site_plan in plan.sites:
        site = sites.get(site_plan.name)
        if site is None or site.kind != site_plan.kind:
            raise PlanError(f"the plan has a {site_plan.kind} site {site_plan.name!r}, which this model has not")
        heads = heads_of(site) or 1
        if (site.width, heads) != (site_plan.width, len(site_plan.kept)):
            planned = f"{len(site_plan.kept)} x {site_plan.width}"
            raise PlanError(f"{site.name}: the plan is for {planned}, the model has {heads} x {site.width}")
        groups.setdefault(module_of(site), []).append((site, site_plan))
    return list(groups.values())


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and their names: statistics and plans of other weights are refused by it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.device.type != "meta":
            try:
                raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(raw.numpy().data)
            except (RuntimeError, TypeError) as error:
                raise ModelError(
                    f"the weight {name} cannot be read here ({error}); gather a sharded model (FSDP), or load it "
                    "without quantisation, before pruning"
                ) from error
    return digest.hexdigest()


def require_prunable(sites: Sites, recipe: Recipe) -> None:
    """Asking for a site that cannot be pruned is an error unless it is skipped; a budget asks for none by name."""
    names = [entry.name for entry in (*sites, *sites.refused)]
    for glob in (*recipe.skip, *recipe.overrides):
        if not any(fnmatchcase(name, glob) for name in names):
            raise PlanError(f"the glob {glob!r} matches no site; they are called {_some(names)}")
    if recipe.has_target:
        return
    refused = [r for r in sites.refused if recipe.sparsity(r.kind, r.name) > 0 and not recipe.skips(r.name)]
    if refused:
        reasons = "; ".join(f"{r.name} ({r.kind}): {r.reason}" for r in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        kinds = " and ".join(f"{kind}=0" for kind in dict.fromkeys(r.kind for r in refused))
        raise PlanError(f"cannot prune {reasons}{more}. Leave them alone with skip=[...] over their names, or {kinds}")


def _require_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise PlanError(f"recipe must be a corp.Recipe, not {type(recipe).__name__}")


def _refuse_sequential(recipe: Recipe) -> None:
    if recipe.sequential is True:
        raise PlanError("sequential fitting needs the data, not its statistics alone: use corp.prune (corp prune)")


def _result(model: nn.Module, smaller: nn.Module, stats: Statistics, plan: Plan) -> Result:
    set_history(smaller, (*history(model), plan))
    report = Report(plan, **_before_after(model, smaller, stats.inputs))
    return Result(smaller, plan, report, stats.origin)


def _plan_site(model: nn.Module, site: Site, keep: int, stats: Statistics, recipe: Recipe) -> SitePlan:
    if isinstance(site, AttentionSite):
        return plan_attention(site, keep, HeadSums.of(site, stats), recipe)
    down = projection_at(model, site.down)
    down = down._replace(weight=down.weight.cpu().double())
    if isinstance(site, MLPSite):
        return plan_mlp(site, keep, down, stats.moments_of(site.name), recipe, stats.fits.get(site.name))
    return plan_values(site, keep, down, stats.moments_of(site.name), recipe)


def _before_after(dense: nn.Module, smaller: nn.Module, inputs: Any) -> dict[str, Any]:
    """Parameters, and operations for one sample where the shape of the input is known."""
    pair = (dense, smaller)
    costs: dict[str, Any] = {"params": tuple(map(count_params, pair)), "macs": None}
    device, dtype = placement(dense)
    if inputs is not None and device.type != "meta":
        batch = move(example(inputs, device), device, dtype)
        with evaluating(dense), evaluating(smaller):
            costs["macs"] = tuple(count_macs(model, batch) for model in pair)
    return costs


def _require_same_weights(model: nn.Module, claims: dict[str, str]) -> None:
    here = fingerprint(model)
    for what, weights in claims.items():
        if weights and weights != here:
            raise StatisticsError(
                f"the {what} belong to other weights than this model's; calibrate this model, or load those weights"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
