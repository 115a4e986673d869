"""The effect of deployment data that differs from calibration data on a plan: per site, from the sums of both.

It gives the distance of the moments, and the exact error of the calibrated fit on the deployment's own sums. The paper
bounds that error (Propositions C.1.3 and C.2.3); the exact error costs no more to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.adapters.registry import find_sites
from corp.calibration.grams import Grams
from corp.calibration.statistics import Statistics
from corp.errors import StatisticsError
from corp.io.tables import text_table
from corp.numerics import affine, logit, rotary, subspace, values
from corp.numerics.linalg import mean_diagonal, solve_vanishing
from corp.planning.fitting import fit_head, fit_linear, fit_rotated, head_system, split
from corp.planning.heads import HeadSums, fit_group
from corp.planning.linear import Layer, choose, layer_of
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan, ratio
from corp.recipe import SUBSPACE, Recipe
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, at_site, projection_at
from corp.surgery.apply import match
from corp.surgery.opened import opened

TINY = torch.finfo(torch.float64).tiny
GROWTH = 0.5  # corp warns if an error grows by more than this share
NEGLIGIBLE = 1e-3  # of the output's energy: below it the growth of an error does not matter
COLUMNS = ("site", "kind", "mean", "spread", "error expected", "on deployment", "growth", "best there")


@dataclass(frozen=True)
class SiteShift:
    """One site. Errors are squared, relative to the energy of the site's output (Q/K: of its logits) on that data.

    mean      how far the means are apart: ||W (mu_t - mu_c)|| / sqrt(E||W x||^2); None for Q/K
    spread    the same for second moments: ||W (S_t - S_c) W^T|| / ||W S_c W^T|| with the covariances S; for Q/K of
              H = sum g_q g_k, each relative to its trace
    expected  the error on unseen data like calibration's: the prediction plus the overfitting on held-out batches
    deployed  the exact error of the calibrated fit on the deployment data
    best      the error of the best fit on the deployment data, with the same kept channels
    """

    name: str
    kind: str
    mean: float | None
    spread: float
    expected: float
    deployed: float
    best: float

    @property
    def growth(self) -> float:
        """Relative growth of the error: 0.5 means 50 % larger than on calibration data."""
        return self.deployed / self.expected - 1 if self.expected > 0 else 0.0

    @property
    def alarming(self) -> bool:
        grown = self.deployed > (1 + GROWTH) * self.expected
        return grown and self.deployed > NEGLIGIBLE

    def row(self) -> tuple[str, ...]:
        """One line of a table, under COLUMNS."""
        mean = "-" if self.mean is None else f"{self.mean:.1%}"
        errors = f"{self.expected:.2%}", f"{self.deployed:.2%}", f"{self.growth:+.0%}", f"{self.best:.2%}"
        return self.name, self.kind, mean, f"{self.spread:.1%}", *errors


@dataclass(frozen=True)
class Shift:
    """The shift at every site that the plan changes; print it, or use `to_dict()`."""

    samples: tuple[int, int]  # of calibration and of deployment
    sites: tuple[SiteShift, ...]

    @property
    def alarming(self) -> list[SiteShift]:
        """Sites whose error grows by more than GROWTH, the worst first."""
        return sorted((site for site in self.sites if site.alarming), key=lambda site: -site.growth)

    def warning(self) -> str | None:
        """A sentence about the worst growth; None if no site is alarming."""
        if not self.alarming:
            return None
        worst = self.alarming[0]
        return (
            f"{worst.name}{f' and {len(self.alarming) - 1} other sites' if len(self.alarming) > 1 else ''}: on the "
            f"deployment data the error is {worst.deployed:.2%} of the output, but calibration predicted "
            f"{worst.expected:.2%}; calibrate on the mixture (stats + deployment), or on data like it"
        )

    def to_dict(self) -> dict[str, Any]:
        sites = [{**asdict(site), "growth": site.growth, "alarming": site.alarming} for site in self.sites]
        return {"samples": {"calibration": self.samples[0], "deployment": self.samples[1]}, "sites": sites}

    def __str__(self) -> str:
        return text_table(COLUMNS, [site.row() for site in self.sites])


class _Found(NamedTuple):
    """Sums over the parts of a site: squared errors and energies, the errors not yet relative."""

    calibrated: float
    energy: float  # on the calibration data
    deployed: float
    best: float
    deployed_energy: float


def measure_shift(
    model: nn.Module,
    stats: Statistics,
    deployment: Statistics,
    plan: Plan,
    *,
    progress: Callable[[int], None] | None = None,
) -> Shift:
    """Evaluate a plan that was made from `stats` on statistics of deployment data, of the same dense model."""
    if deployment.weights != stats.weights or set(deployment.sums) != set(stats.sums):
        raise StatisticsError("the deployment statistics are of another model; calibrate this one on deployment data")
    found = []
    model = opened(model)
    for group in match(find_sites(model), plan):
        for site, site_plan in group:
            with at_site(site):
                found.append(_site_shift(model, site, site_plan, stats, deployment, plan.recipe))
            if progress:
                progress(1)
    return Shift((stats.samples, deployment.samples), tuple(found))


def _site_shift(
    model: nn.Module, site: Site, planned: SitePlan, stats: Statistics, deployment: Statistics, recipe: Recipe
) -> SiteShift:
    mean: float | None = None
    if isinstance(site, AttentionSite):
        sums, there = HeadSums.of(site, stats), HeadSums.of(site, deployment)
        found, spread = _heads(site, planned, sums, there, recipe)
    else:
        down = projection_at(model, site.down)
        here, there_ = (
            layer_of(down, part.moments_of(site.name).total(), planned.intercept) for part in (stats, deployment)
        )
        mean, spread = _apart(here, there_)
        found = _linear(site, planned, stats, here, there_, recipe)
    expected = (1 + planned.overfit) * ratio(found.calibrated, found.energy)
    deployed, best = (ratio(value, found.deployed_energy) for value in (found.deployed, found.best))
    return SiteShift(site.name, site.kind, mean, spread, expected, deployed, best)


def _apart(here: Layer, there: Layer) -> tuple[float, float]:
    """Relative difference of the mean, and of the covariance, of the layer's output."""
    W = here.W
    energy = affine.output_energy(*here)
    mean = float(torch.linalg.vector_norm(W @ (there.mean - here.mean))) / max(energy, TINY) ** 0.5
    outputs = [W @ layer.cov @ W.mT for layer in (here, there)]
    return mean, _relative(outputs[0], outputs[1])


def _linear(
    site: LinearSite, planned: SitePlan, stats: Statistics, here: Layer, there: Layer, recipe: Recipe
) -> _Found:
    """Errors of an MLP or of values, which are both inputs of a linear layer."""
    if isinstance(site, MLPSite):
        (kept,) = planned.indices()
    else:
        basis = choose(site, planned.keep, here, stats.moments_of(site.name).total(), recipe).basis
        kept = values.kept_inputs(planned.indices(), site.width, site.heads)
        if basis is not None:
            here, there = (Layer(*values.rotate(*layer, basis, site.heads)) for layer in (here, there))
    pruned = split(site.inputs, kept)
    seen, new = (affine.removal(*layer, kept, pruned) for layer in (here, there))
    fit, best = fit_linear(seen, recipe.compensate, planned.ridge), affine.best_affine(new)
    energies = affine.output_energy(*here), affine.output_energy(*there)
    return _found(affine.error, (seen, new), fit, best, energies)


def _heads(
    site: AttentionSite, planned: SitePlan, sums: HeadSums, there: HeadSums, recipe: Recipe
) -> tuple[_Found, float]:
    """Errors of all heads of an attention, and how far H is from calibration's."""
    found: list[_Found] = []
    apart: list[tuple[Tensor, Tensor]] = []
    dims = site.rotary_dims
    for g, kept in enumerate(planned.indices()):
        heads = site.sharing(g)
        if sums.pairs is not None and there.pairs is not None:
            both = [part.total().group(g, weighted=recipe.weighs_pairs) for part in (sums.pairs, there.pairs)]
            pairs = kept[kept < dims // 2]
            for A_c, A_t in zip(*both, strict=True):
                found.append(_pairs(A_c, A_t, pairs, recipe))
                apart.append((A_c, A_t))
        if sums.grams is not None and there.grams is not None:
            plain = kept[kept >= dims] - dims
            grams = sums.grams.total(), there.grams.total()
            centred = planned.basis == SUBSPACE
            part = _subspaces if centred else _dimensions
            found += part(grams, heads, plain, site.plain_width, recipe)
            apart += [
                (grams[0].head(h, centred=centred).cross(), grams[1].head(h, centred=centred).cross()) for h in heads
            ]
    spread = [_relative(a / _trace(a), b / _trace(b)) for a, b in apart]
    return _together(found), sum(spread) / len(spread)


def _pairs(A_c: Tensor, A_t: Tensor, kept: Tensor, recipe: Recipe) -> _Found:
    """Errors of one rotary head."""
    pruned = split(len(A_c) // 2, kept)
    here, there = (rotary.pair_system(A, kept, pruned) for A in (A_c, A_t))
    fit = fit_rotated(here, recipe.compensate, recipe.ridge)
    best = solve_vanishing(there.A, there.h[:, None], mean_diagonal(there.A))[:, 0]
    return _found(rotary.error, (here, there), fit, best, (rotary.logit_energy(A_c), rotary.logit_energy(A_t)))


def _dimensions(
    grams: tuple[Grams, Grams], heads: Iterable[int], kept: Tensor, width: int, recipe: Recipe
) -> list[_Found]:
    found = []
    for h in heads:
        both = [part.head(h) for part in grams]
        here, there = (head_system(head, kept, split(width, kept)) for head in both)
        M, best = fit_head(here, recipe.compensate, recipe.ridge), logit.best_logit(there)
        energies = [float(head.energy().sum()) for head in both]
        found.append(_found(logit.error, (here, there), M, best, energies))
    return found


def _subspaces(grams: tuple[Grams, Grams], heads: range, kept: Tensor, _width: int, recipe: Recipe) -> list[_Found]:
    exact = recipe.compensate == "full"
    here, there = (fit_group(part, heads, len(kept), recipe.ridge, exact_steps=exact) for part in grams)
    found = []
    for i, h in enumerate(heads):
        both = [part.head(h, centred=True) for part in grams]
        errors = [subspace.error(head, here.A[i], here.B) for head in both]
        best = min(errors[1], subspace.error(both[1], there.A[i], there.B))
        energies = [float(head.energy().sum()) for head in both]
        found.append(_Found(errors[0], energies[0], errors[1], best, energies[1]))
    return found


def _found(
    error: Callable[..., float], systems: Sequence[Any], fit: Any, best: Any, energies: Sequence[float]
) -> _Found:
    """Errors of the calibrated fit and of the best one; systems and energies are of calibration and deployment."""
    here, there = systems
    return _Found(error(here, fit), energies[0], error(there, fit), error(there, best), energies[1])


def _together(found: list[_Found]) -> _Found:
    return _Found(*(sum(parts) for parts in zip(*found, strict=True)))


def _relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.matrix_norm(b - a)) / max(float(torch.linalg.matrix_norm(a)), TINY)


def _trace(H: Tensor) -> float:
    return max(float(H.diagonal().sum()), TINY)
