"""A check of a pruned model on data: every pruned site gets the dense model's inputs, and its error is measured.

Sums are collected on the same batches; they and the weights predict each site's error (self_check.py). Both methods
must give the same number, although only the first runs the narrowed modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

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
from corp.surgery.padded import taken
from corp.surgery.self_check import Finding, errors_in

# A forward pass rounds at every step, not once: 1e-7 becomes some 1e-5 of the output, 1e-16 some 1e-10.
ACCUMULATED = 0.65


@dataclass(frozen=True)
class Checked:
    """One site's error relative to its output: planned, predicted by the sums of these batches, and measured."""

    planned: float  # on the calibration data
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
    """Check every site that the plan narrowed; `dense` is changed temporarily.

    Each site is narrowed alone, so that its inputs are the ones that the sums describe.
    """
    dense, pruned = opened(dense), opened(pruned)
    if plan.weights and fingerprint(dense) != plan.weights:
        raise PlanError("this dense model is not the one that was pruned: its weights differ")
    sites = find_sites(dense)
    tried = find_sites(dense, first_batch(batches), forward)  # the data show more: whether attentions are causal
    sites = sites.replacing({site.name: site for site in tried})
    stats = calibrate(dense, batches, forward=forward, settings=Settings(tokens="all"))
    epsilon = _coarsest(pruned, first_batch(batches), forward) ** ACCUMULATED
    both = Both(dense, pruned, sites, stats, plan)
    checked = []
    with evaluating(dense), evaluating(pruned), torch.no_grad():
        for group in match(sites, plan):
            for site, site_plan in group:
                finding = _Trial(both, site, site_plan, batches, forward).finding(epsilon)
                if finding is not None:
                    checked.append(Checked(site_plan.relative_error, finding))
            if progress:
                progress(1)
    return checked


def _coarsest(model: nn.Module, batch: Any, forward: Forward | None) -> float:
    """The largest rounding error of the layers' outputs, which under autocast is not that of the weights."""
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
            f"{len(odd)} of {len(checked)} sites do not compute what their weights predict: {first.finding.site} "
            f"should lose {first.expected:.3%} of its output here and loses {first.measured:.3%}; the model is "
            f"damaged, or "
            "something (a hook, a wrapper, another version of its library) changes what its modules compute"
        )


class _Trial:
    """One site of the dense model, narrowed alone, so that it gets the dense model's inputs."""

    def __init__(self, both: Both, site: Site, plan: SitePlan, batches: Sequence[Any], forward: Forward | None) -> None:
        self.both, self.site, self.plan, self.batches, self.forward = both, site, plan, batches, forward
        self.rows = both.rows(site)
        self.narrow = site  # as it is in the pruned model
        if isinstance(site, ValueSite) and self.rows is not None:
            self.narrow = replace(site, v=self.rows["v"])
        elif isinstance(site, AttentionSite) and self.rows is not None:
            self.narrow = replace(site, q=self.rows["q"], k=self.rows["k"])

    def finding(self, epsilon: float) -> Finding | None:
        """The predicted and the measured error; None if nothing can be compared."""
        both, site, estimated, terms = self.both, self.site, 0.0, 0.0
        if isinstance(site, MLPSite) and site.experts and not both.stats.moments_of(site.name).total().n:
            return None  # no token of these batches is routed to it
        expected = errors_in(both, site, self.plan)
        if expected is None:
            return None
        if isinstance(site, AttentionSite):
            errors = LogitErrors(site, self.plan, weighted=both.weighted)
            self._add_logits(site, errors)
            measured, energy = errors.total, errors.energy(both.stats)
            if site.norm is not None and self.rows is not None:
                estimated = normed_errors(both, site, self.rows, self.plan)[1]
        else:
            measured, terms = self._output_error(site)
            moments = both.stats.moments_of(site.name).total()
            W = projection_at(both.dense, site.down).weight.cpu().double()
            energy = output_energy(W, moments.mean, moments.cov())
        return Finding(site.name, site.kind, expected.error, measured, energy, epsilon, estimated, terms, expected.sums)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The narrowed modules of this site alone, by the names of the modules that they replace."""
        (dense, pruned, *_), site, narrow = self.both, self.site, self.narrow
        if isinstance(narrow, MLPSite) or isinstance(site, MLPSite):
            return {name: pruned.get_submodule(name) for name in layers_of(site)}
        parts: Parts = {}
        if isinstance(narrow, ValueSite):
            parts["v"] = rows_of(pruned, narrow.v)
        else:
            parts |= {"q": rows_of(pruned, narrow.q), "k": rows_of(pruned, narrow.k)}
            if narrow.rotary:
                parts["kept"] = torch.stack(self.plan.indices())
            if narrow.norm is not None:
                parts["norms"] = [pruned.get_submodule(name) for name in (narrow.norm.q, narrow.norm.k)]
        if site.padded:
            new: dict[str, nn.Module] = site.build.layers(dense, parts)
        else:
            new = {site.attention: site.build(dense.get_submodule(site.attention), **parts)}
        if isinstance(site, ValueSite):  # after the attention, which may contain the output projection
            new[site.down] = pruned.get_submodule(site.down)
        return new

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Within this context, the dense model has the narrowed modules in place of its own."""
        dense = self.both.dense
        before = {name: dense.get_submodule(name) for name in self.modules}
        try:
            for name, module in self.modules.items():
                dense.set_submodule(name, module)
            yield
        finally:
            for name, module in before.items():
                dense.set_submodule(name, module)

    def _output_error(self, site: LinearSite) -> tuple[float, float]:
        """E||y - y'||^2 over real tokens, where y' is the narrowed modules' output for the dense model's input.

        The second number is the energy of the products whose sum is y'.
        """
        dense, pruned, narrow = self.both.dense, self.both.pruned, self.narrow
        assert not isinstance(narrow, AttentionSite)
        old, new = (projection_at(model, site.down) for model in (dense, pruned))
        total, terms, tokens = 0.0, 0.0, 0
        down: Any = pruned.get_submodule(site.down)  # if padded, it selects the kept features
        for batch in self.batches:
            given = Inputs.of(site)
            with given.recorded(dense):
                x = _inputs(dense, site, batch, self.forward)
            if not len(x):
                continue
            with self._swapped(), given.replayed(dense):
                x_new = _inputs(dense, narrow, batch, self.forward)
            if isinstance(site, ValueSite) and site.padded:
                y, y_new = F.linear(x.to(old.weight), *old), down(x_new.to(down.weight))
            else:
                y, y_new = (F.linear(part.to(layer.weight), *layer) for part, layer in ((x, old), (x_new, new)))
            total += float((y.double() - y_new.double()).square().sum())
            kept = taken(down, x_new).double().square().sum(0)  # (S,)
            terms += float(kept @ new.weight.double().square().sum(0))
            tokens += len(y)
        return total / max(1, tokens), terms / max(1, tokens)

    def _add_logits(self, site: AttentionSite, errors: LogitErrors) -> None:
        """Add the logits of all batches, before and after, to `errors`."""
        dense, narrow = self.both.dense, self.narrow
        assert isinstance(narrow, AttentionSite)
        heads = rotated_heads_at if site.rotary and not site.padded else heads_at
        for batch in self.batches:
            once, given = partial(feed, dense, batch, self.forward), Inputs.of(site)
            with given.recorded(dense):
                before = heads_at(dense, site, once)
            with self._swapped(), given.replayed(dense):
                after = heads(dense, site if site.padded else narrow, once)  # padded ones keep their width
            for call in zip(before, after, strict=True):
                errors.add(*call)


def _inputs(model: nn.Module, site: LinearSite, batch: Any, forward: Forward | None) -> Tensor:
    """The inputs (N, D) of the site's second layer in all calls, real tokens only."""
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
        raise ModelError(f"no data reached {site.down} in these batches")
    return torch.cat(seen)
