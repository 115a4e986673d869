"""Does a pruned model do what its weights say? Every pruned site is fed what the dense model feeds it, and measured.

Sums are taken on the same batches; they and the weights say what each site must get wrong (self_check.py). Both ways
must give the same number: one runs the narrowed modules, the other never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp.adapters.registry import find_sites
from corp.api import calibrate
from corp.calibration.batches import Forward, evaluating, feed, first_batch
from corp.calibration.collector import Collector
from corp.calibration.hooks import removing
from corp.calibration.settings import Settings
from corp.calibration.threads import here
from corp.calibration.tokens import real_tokens
from corp.errors import ModelError, PlanError
from corp.evaluate.logits import LogitErrors, heads_at, rotated_heads_at
from corp.evaluate.replay import Inputs
from corp.numerics.affine import output_energy
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan
from corp.sites import (
    AttentionSite,
    LinearSite,
    MLPSite,
    Rows,
    Site,
    ValueSite,
    fingerprint,
    layers_of,
    projection_at,
    rows_of,
)
from corp.surgery.apply import match
from corp.surgery.attention import Parts
from corp.surgery.both import Both
from corp.surgery.normed_check import normed_errors
from corp.surgery.opened import opened
from corp.surgery.self_check import Finding, errors_in

# A forward pass rounds at every step, not once: 1e-7 becomes some 1e-5 of the output, 1e-16 some 1e-10.
ACCUMULATED = 0.65


@dataclass(frozen=True)
class Checked:
    """One site's error relative to its output: as planned, as the sums of these batches predict it, as measured."""

    planned: float  # of the calibration data
    finding: Finding

    @property
    def expected(self) -> float:
        return self.finding.planned / self.finding.energy if self.finding.energy else 0.0

    @property
    def measured(self) -> float:
        return self.finding.found / self.finding.energy if self.finding.energy else 0.0

    def to_dict(self) -> dict[str, Any]:
        numbers = {"planned": self.planned, "expected": self.expected, "measured": self.measured}
        return {"site": self.finding.site, "kind": self.finding.kind, **numbers, "agrees": self.finding.agrees}


def check(
    dense: nn.Module,
    pruned: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    *,
    forward: Forward | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Checked]:
    """Every site that the plan narrowed; `dense` is changed along the way, and put back.

    Each is narrowed alone, so that what the dense model feeds it is what the sums are of.
    """
    dense, pruned = opened(dense), opened(pruned)
    if plan.weights and fingerprint(dense) != plan.weights:
        raise PlanError("the dense model has other weights than the one that was pruned; give that one")
    sites = find_sites(dense)
    stats = calibrate(dense, batches, forward=forward, settings=Settings(tokens="all"))
    epsilon = _coarsest(pruned, first_batch(batches), forward) ** ACCUMULATED
    both = Both(dense, pruned, sites, stats, plan)
    checked = []
    with evaluating(dense), evaluating(pruned), torch.no_grad():
        for group in match(sites, plan):
            for site, site_plan in group:
                if isinstance(site, MLPSite) and site.experts and not stats.moments_of(site.name).total().n:
                    continue  # no token of these batches is routed to it
                rows = both.rows(site)
                expected = errors_in(both, site, site_plan)
                if expected is None:
                    continue
                narrow = _narrowed(site, rows)
                swap = partial(_swapped, dense, _modules(dense, pruned, site, narrow, site_plan))
                if isinstance(site, AttentionSite):
                    errors = LogitErrors(site, site_plan, weighted=both.weighted)
                    measured = _logit_error(dense, site, narrow, swap, errors, batches, forward)
                    energy = errors.energy(stats)
                else:
                    measured = _output_error(dense, pruned, site, narrow, swap, batches, forward)
                    moments = stats.moments_of(site.name).total()
                    W = projection_at(dense, site.down).weight.cpu().double()
                    energy = output_energy(W, moments.mean, moments.cov())
                estimated = 0.0
                if isinstance(site, AttentionSite) and site.norm is not None and rows is not None:
                    estimated = normed_errors(both, site, rows, site_plan)[1]
                finding = Finding(site.name, site.kind, expected, measured, energy, epsilon, estimated)
                checked.append(Checked(site_plan.relative_error, finding))
            if progress:
                progress(1)
    return checked


def _coarsest(model: nn.Module, batch: Any, forward: Forward | None) -> float:
    """The largest rounding error of what the model's layers give: under autocast, it is not that of its weights."""
    found = {next(model.parameters()).dtype}

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        found.update({output.dtype} if isinstance(output, Tensor) and output.is_floating_point() else ())

    hooks = [module.register_forward_hook(here(note)) for module in model.modules()]
    with torch.no_grad(), evaluating(model), removing(hooks):
        feed(model, batch, forward)
    return max(torch.finfo(dtype).eps for dtype in found)


def require_equal(checked: Sequence[Checked]) -> None:
    odd = [one for one in checked if not one.finding.agrees]
    if odd:
        first = odd[0]
        raise ModelError(
            f"{len(odd)} of {len(checked)} sites do not do what their weights say: {first.finding.site} should lose "
            f"{first.expected:.3%} of its output here and loses {first.measured:.3%}; the model is damaged, or "
            "something (a hook, a wrapper, another version of its library) changes what its modules compute"
        )


def _narrowed(site: Site, rows: dict[str, Rows] | None) -> Site:
    """The site as it is in the pruned model."""
    if isinstance(site, MLPSite) or rows is None:
        return site
    return replace(site, v=rows["v"]) if isinstance(site, ValueSite) else replace(site, q=rows["q"], k=rows["k"])


Swap: TypeAlias = Callable[[], AbstractContextManager[None]]


def _modules(dense: nn.Module, pruned: nn.Module, site: Site, narrow: Site, plan: SitePlan) -> dict[str, nn.Module]:
    """The narrowed modules of one site, and of no other, by the names of those in whose places they go."""
    if isinstance(narrow, MLPSite) or isinstance(site, MLPSite):
        return {name: pruned.get_submodule(name) for name in layers_of(site)}
    parts: Parts = {}
    if isinstance(narrow, ValueSite):
        parts["v"] = rows_of(pruned, narrow.v)
    else:
        parts |= {"q": rows_of(pruned, narrow.q), "k": rows_of(pruned, narrow.k)}
        if narrow.rotary:
            parts["kept"] = torch.stack(plan.indices())
        if narrow.norm is not None:
            parts["norms"] = [pruned.get_submodule(name) for name in (narrow.norm.q, narrow.norm.k)]
    if site.padded:
        new: dict[str, nn.Module] = site.build.layers(dense, parts)
    else:
        new = {site.attention: site.build(dense.get_submodule(site.attention), **parts)}
    if isinstance(site, ValueSite):  # behind the attention: its output projection may be inside of that
        new[site.down] = pruned.get_submodule(site.down)
    return new


@contextmanager
def _swapped(dense: nn.Module, new: dict[str, nn.Module]) -> Iterator[None]:
    """Inside, the dense model has these modules in the places of its own."""
    before = {name: dense.get_submodule(name) for name in new}
    try:
        for name, module in new.items():
            dense.set_submodule(name, module)
        yield
    finally:
        for name in new:
            dense.set_submodule(name, before[name])


def _output_error(
    dense: nn.Module,
    pruned: nn.Module,
    site: LinearSite,
    narrow: Site,
    swap: Swap,
    batches: Iterable[Any],
    forward: Forward | None,
) -> float:
    """E||y - y'||^2 over real tokens, y' being what the narrowed modules make of the dense model's own input."""
    assert not isinstance(narrow, AttentionSite)
    old, new = (projection_at(model, site.down) for model in (dense, pruned))
    total, tokens = 0.0, 0
    for batch in batches:
        given = Inputs.of(site)
        with given.recorded(dense):
            x = _inputs(dense, site, batch, forward)
        if not len(x):
            continue
        with swap(), given.replayed(dense):
            x_new = _inputs(dense, narrow, batch, forward)
        if isinstance(site, ValueSite) and site.padded:
            down: Any = pruned.get_submodule(site.down)  # which picks what is left
            y, y_new = F.linear(x.to(old.weight), *old), down(x_new.to(down.weight))
        else:
            y, y_new = (F.linear(part.to(layer.weight), *layer) for part, layer in ((x, old), (x_new, new)))
        total += float((y.double() - y_new.double()).square().sum())
        tokens += len(y)
    return total / max(1, tokens)


def _logit_error(
    dense: nn.Module,
    site: AttentionSite,
    narrow: Site,
    swap: Swap,
    errors: LogitErrors,
    batches: Iterable[Any],
    forward: Forward | None,
) -> float:
    """The squared difference of all logits."""
    assert isinstance(narrow, AttentionSite)
    heads = rotated_heads_at if site.rotary and not site.padded else heads_at
    for batch in batches:
        once, given = partial(feed, dense, batch, forward), Inputs.of(site)
        with given.recorded(dense):
            before = heads_at(dense, site, once)
        with swap(), given.replayed(dense):
            after = heads(dense, site if site.padded else narrow, once)  # padded ones are as wide as before
        for call in zip(before, after, strict=True):
            errors.add(*call)
    return errors.total


def _inputs(model: nn.Module, site: LinearSite, batch: Any, forward: Forward | None) -> Tensor:
    """What goes into the site's second layer, in all calls, real tokens only (N, D)."""
    seen: list[Tensor] = []

    def see(x: Tensor, mask: Tensor | None) -> None:
        seen.append(real_tokens(x, mask).clone())

    collector = Collector([site], {})
    with collector.hooks(model) as handles:
        handles.append(collector.before(model, site, see))
        feed(model, batch, forward)
    if not seen and isinstance(site, MLPSite) and site.experts:
        return torch.empty(0, site.width)  # no token of this batch is routed to it
    if not seen:
        raise ModelError(f"nothing passed {site.down}: these batches do not reach it")
    return torch.cat(seen)
