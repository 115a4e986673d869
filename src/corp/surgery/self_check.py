"""The self-check: errors are recomputed from the weights of the pruned model and compared with the plan.

The plan predicts errors from its own fits, which are not used here. The narrowed and the dense weights give the map of
each site, and that map and the sums give its error. A defective fold, a layer that was changed by other code or a
weight that was damaged by a cast shows as a disagreement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from corp.calibration.statistics import Statistics
from corp.errors import ModelError
from corp.io.observer import Advance
from corp.numerics import rotary, subspace
from corp.numerics.affine import Folded
from corp.numerics.linalg import energy_in
from corp.numerics.output import LowRank, output_error
from corp.numerics.place import Place, in_float64
from corp.planning.fitting import split
from corp.planning.output import OutputPlan
from corp.planning.plan import Plan
from corp.planning.site_plan import LinearFold, SitePlan
from corp.recipe import SUBSPACE
from corp.sites import (
    AttentionSite,
    LinearSite,
    MLPSite,
    Rows,
    Site,
    Sites,
    ValueSite,
    projection_at,
    rows_of,
    site_devices,
)
from corp.surgery.both import Both
from corp.surgery.normed_check import normed_errors
from corp.surgery.row_maps import heads_in, map_between, maps_in

ROUNDING = 4.0  # the model's dtype rounds every weight; differences of this many epsilons are attributed to that
SLACK = 1e-6  # relative: the sums themselves consist of float32 products
NOTHING = 1e-8  # of a site's energy: an error that those sums cannot distinguish from zero


@dataclass(frozen=True)
class Finding:
    """One site's planned error, and the one computed from its weights; `energy` is the scale of both.

    `terms` is the energy of the products that the narrowed layer adds up. They cancel if its weights are large, as
    after a fit on few tokens, and then rounding depends on their size, not on the size of the sum. Likewise `sums`:
    both errors are small differences of sums of float32 products.
    """

    site: str
    kind: str
    planned: float
    found: float
    energy: float
    epsilon: float
    estimated: float = 0.0  # the part of `planned` that is approximate: QK-norm's lengths, to first order
    terms: float = 0.0
    sums: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether both are equal up to rounding: rounding r adds at most 2 sqrt(J r) + r to an error J."""
        r = (ROUNDING * self.epsilon) ** 2 * max(self.energy, self.terms) + SLACK**2 * self.energy + self.estimated
        allowed = 2 * math.sqrt(max(0.0, self.planned) * r) + r + SLACK * abs(self.planned) + NOTHING * self.energy
        allowed += SLACK * self.sums
        # Sums of a handful of tokens may give a negative error: zero up to rounding, whose size it shows.
        allowed += 2 * max(0.0, -self.planned)
        return math.isfinite(self.found) and abs(max(0.0, self.found) - max(0.0, self.planned)) <= allowed


def verify(
    dense: nn.Module,
    pruned: nn.Module,
    sites: Sites,
    stats: Statistics,
    plan: Plan,
    advance: Advance = lambda _sites: None,
) -> list[Finding]:
    """Check every planned site whose narrowed weights are where corp's own modules keep them."""
    epsilon = torch.finfo(next(pruned.parameters()).dtype).eps
    stats = stats.at({name: Place.exactly(device) for name, device in site_devices(dense, sites).items()})
    both = Both(dense, pruned, sites, stats, plan)
    findings = []
    for site_plan in plan.sites:
        site = sites[site_plan.name]
        found = errors_in(both, site, site_plan)
        if found is not None:
            planned, energy = (sum(getattr(cost, name) for cost in site_plan.costs) for name in ("J", "energy"))
            sums = found.sums + _planned_sums(dense, site, site_plan, stats)
            findings.append(Finding(site.name, site.kind, planned, found.error, energy, epsilon, sums=sums))
        advance(1)
    if plan.output is not None:
        findings.append(_output_finding(dense, pruned, stats, plan.output, epsilon))
    return findings


def _output_finding(
    dense: nn.Module, pruned: nn.Module, stats: Statistics, plan: OutputPlan, epsilon: float
) -> Finding:
    """The error of the factored output head, from its weights."""
    P, _ = in_float64(*projection_at(pruned, f"{plan.name}.down"))
    U, b = in_float64(*projection_at(pruned, f"{plan.name}.up"))
    moments, linear = stats.moments_of(plan.name).total(), Folded(*in_float64(*projection_at(dense, plan.name)))
    found = output_error(linear, LowRank(P, U, b), moments.mean, moments.cov())
    return Finding(plan.name, "output", plan.J, found, plan.energy, epsilon)


def require_agreement(findings: Sequence[Finding]) -> None:
    """Raise an error if a site disagrees with its plan, so that a defective model is never returned."""
    odd = [finding for finding in findings if not finding.agrees]
    if odd:
        first = odd[0]
        share = (value / first.energy if first.energy else 0.0 for value in (first.planned, first.found))
        planned, found = (f"{value:.3%}" for value in share)
        raise ModelError(
            f"self-check: {first.site} ({first.kind}) should have an error of {planned} of its output by the plan, "
            f"but its new weights give {found}; {len(odd)} of {len(findings)} sites disagree. The model is not "
            "returned: this is a defect of corp, or hooks or wrappers changed the weights on the way; please report it"
        )


class Remainder(NamedTuple):
    """A site's error, and the size of the sums that it is what is left of: sum_ij D_ij^2 Sigma_jj if D is lost."""

    error: float
    sums: float = 0.0


def errors_in(both: Both, site: Site, site_plan: SitePlan) -> Remainder | None:
    """The error of one site with the weights of the pruned model, from the sums; None if they are not found."""
    dense, pruned, stats = both.dense, both.pruned, both.stats
    if isinstance(site, MLPSite):
        W_new, b_new = in_float64(*projection_at(pruned, site.down))
        kept = site_plan.indices()[0].to(W_new.device)
        whole = W_new.new_zeros(len(W_new), site.width).index_copy_(1, kept, W_new)
        return _output_error(dense, site, whole, b_new, stats)
    if (rows := both.rows(site)) is None:
        return None
    if isinstance(site, ValueSite):
        T = maps_in(rows_of(dense, site.v), rows_of(pruned, rows["v"]), site.groups)
        each = [t for t in T for _ in range(site.heads // site.groups)]
        W_new, b_new = in_float64(*projection_at(pruned, site.down))
        return _output_error(dense, site, W_new @ torch.block_diag(*each), b_new, stats)
    return Remainder(_logit_error(both, site, rows, site_plan))


def _planned_sums(dense: nn.Module, site: Site, site_plan: SitePlan, stats: Statistics) -> float:
    """The size of the sums behind the planned error of values in a basis of their own.

    The basis magnifies dimensions that hardly vary, which the weights do not show: they make next to nothing of them.
    """
    fold = site_plan.fold
    if not isinstance(site, ValueSite) or not isinstance(fold, LinearFold) or not fold.maps:
        return 0.0
    W_new, b_new = in_float64(*fold.folded)
    T = [t.to(W_new) for t in fold.maps for _ in range(site.heads // site.groups)]
    return _output_error(dense, site, W_new @ torch.block_diag(*T), b_new, stats).sums


def _output_error(dense: nn.Module, site: LinearSite, W_new: Tensor, b_new: Tensor, stats: Statistics) -> Remainder:
    """E||W x + b - W' x - b'||^2, where W' (o, D) is the map of the narrowed site on all of its inputs."""
    W, b = in_float64(*projection_at(dense, site.down))
    moments = stats.moments_of(site.name).total()
    D, cov = W - W_new, moments.cov()
    error = energy_in(D, cov) + float((D @ moments.mean + b - b_new).square().sum())
    return Remainder(error, float((D.square() @ cov.diagonal()).sum()))


def _logit_error(both: Both, site: AttentionSite, rows: dict[str, Rows], site_plan: SitePlan) -> float:
    """The squared error of the logits of all heads, rotated dimensions and others."""
    if site.norm is not None:
        return sum(normed_errors(both, site, rows, site_plan))
    shared, dims = site.heads // site.groups, site.rotary_dims
    rotated = int((site_plan.indices()[0] < dims).sum())
    q, k = (
        heads_in(rows_of(both.dense, old), rows_of(both.pruned, rows[side]), count)
        for side, old, count in (("q", site.q, site.heads), ("k", site.k, site.groups))
    )
    total = 0.0
    grams = both.stats.grams_of(site.plain_name).total() if site.plain_width else None
    pairs = both.stats.pairs_of(site.name).total() if site.rotary else None
    for h in range(site.heads):
        g = h // shared
        if grams is not None:
            A, B = (map_between(old[dims:], new[rotated:]) for old, new in (q[h], k[g]))
            total += subspace.error(grams.head(h, centred=site_plan.basis == SUBSPACE), A, B)
        if pairs is not None:
            A = map_between(q[h][0][:dims], q[h][1][:rotated])  # (rotated, dims)
            kept = site_plan.indices()[g][: rotated // 2]
            ab = _pair_factors(A, kept, dims)
            moments = pairs.group(g, weighted=both.weighted)[h % shared]
            total += rotary.error(rotary.pair_system(moments, kept, split(dims // 2, kept)), ab)
    return total


def _pair_factors(A: Tensor, kept: Tensor, dims: int) -> Tensor:
    """The (a, b) of pair_map that give the map A (2S, d)."""
    S, line = len(kept), torch.arange(len(kept))
    return torch.cat([A[line, kept] - 1, A[:S][line, kept + dims // 2]])
