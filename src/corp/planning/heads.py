"""Query and key dimensions, head by head: rotated ones in pairs, the others as they are or as a subspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.calibration.statistics import Statistics
from corp.numerics import logit, rank, rotary, subspace
from corp.observer import stage
from corp.planning.fitting import fit_head, fit_turned, head_system
from corp.planning.plan import GroupCost, SitePlan
from corp.planning.widths import rotated_part
from corp.recipe import COORDINATES, SUBSPACE, Recipe
from corp.sites import AttentionSite

Part: TypeAlias = tuple[list[int], GroupCost]  # dimensions kept, and their cost
Shares: TypeAlias = tuple[float | None, float | None]  # unexplained, of what was removed: on fitted and on unseen data


class HeadSums(NamedTuple):
    """The sums of an attention's rotated dimensions and of the others, where it has them."""

    pairs: SiteSums[PairSums] | None
    grams: SiteSums[Grams] | None
    fits: dict[Any, Any]  # of the last plan, by head, what it kept and the ridge

    @classmethod
    def of(cls, site: AttentionSite, stats: Statistics) -> HeadSums:
        pairs = stats.pairs_of(site.name) if site.rotary else None
        grams = stats.grams_of(site.plain_name) if site.plain_width else None
        return cls(pairs, grams, stats.fits.setdefault(site.name, {}))


def plan_attention(site: AttentionSite, keep: int, sums: HeadSums, recipe: Recipe) -> SitePlan:
    """Rank, choose and predict for every key head of one attention and the query heads that share it."""
    parts = _parts(site, keep, sums, recipe)
    ridge = choose_ridge(parts, site.groups, recipe)
    sums.fits.clear()
    kept, costs = [], []
    for g in range(site.groups):
        planned = [part.plan(g, ridge, sums.fits) for part in parts]
        kept.append(tuple(i for dims, _ in planned for i in dims))
        costs.append(together([cost for _, cost in planned]))
    sparsity = 1 - keep / site.width if recipe.has_target else recipe.sparsity("attn", site.name)
    basis = _basis(site, recipe)
    return SitePlan(site.name, "attn", site.width, sparsity, tuple(kept), False, tuple(costs), ridge, basis)


def sketch_attention(site: AttentionSite, keep: int, sums: HeadSums, recipe: Recipe) -> SitePlan:
    """The same without predictions, and with subspaces as they start: for models that are tried, not kept."""
    parts, ridge = _parts(site, keep, sums, recipe), recipe.ridge_given
    sums.fits.clear()
    for part in parts:
        if isinstance(part, _Subspaces):
            sums.fits.update({(g, part.keep, ridge): part.start(g, ridge) for g in range(site.groups)})
    kept = tuple(tuple(i for part in parts for i in part.kept(g)) for g in range(site.groups))
    basis = _basis(site, recipe)
    return SitePlan(site.name, "attn", site.width, 1 - keep / site.width, kept, False, (), ridge, basis)


def _basis(site: AttentionSite, recipe: Recipe) -> str:
    return SUBSPACE if recipe.attn_basis == SUBSPACE and site.plain_width else COORDINATES


def _parts(site: AttentionSite, keep: int, sums: HeadSums, recipe: Recipe) -> list[_Pairs | _Dimensions | _Subspaces]:
    """The rotated dimensions, and the others."""
    pairs_kept = rotated_part(site, keep) // 2 if site.rotary else 0
    parts: list[_Pairs | _Dimensions | _Subspaces] = []
    if sums.pairs is not None:
        parts.append(_Pairs(sums.pairs, pairs_kept, recipe))
    if sums.grams is not None:
        kind = _Subspaces if _basis(site, recipe) == SUBSPACE else _Dimensions
        parts.append(kind(sums.grams, site, keep - 2 * pairs_kept, recipe))
    return parts


def choose_ridge(parts: Sequence[_Pairs | _Dimensions | _Subspaces], groups: int, recipe: Recipe) -> float:
    """The recipe's."""
    return recipe.ridge_given


def held_out(sums: SiteSums[Grams] | SiteSums[PairSums]) -> bool:
    return sums.fit.samples > 0 and sums.held.samples > 0


class _Pairs:
    """The rotated dimensions of all heads: `keep` pairs of every key head; every query head is corrected by itself."""

    def __init__(self, sums: SiteSums[PairSums], keep: int, recipe: Recipe) -> None:
        self.sums, self.keep, self.recipe = sums, keep, recipe
        self.whole = sums.all  # fitted and held-out together: added once, not per head
        self.weighted = recipe.rank == "exact"
        self.choose = cache(self._choose)  # the ridge, the judgement and the fit all ask

    def _choose(self, g: int) -> tuple[Tensor, Tensor]:
        moments = self.whole.group(g, weighted=self.weighted)  # (R, d, d)
        with stage("rank"):
            if self.weighted:
                return rotary.eliminate(moments, self.keep)
            return rank.top(torch.stack([rotary.pair_energy(A) for A in moments]).sum(0), self.keep)

    def kept(self, g: int) -> list[int]:
        first = self.choose(g)[0]
        return [*first.tolist(), *(first + self.whole.width // 2).tolist()]

    def systems(self, g: int) -> Iterator[tuple[rotary.PairSystem, rotary.PairSystem]]:
        """Of every query head, on fitted and on held-out data."""
        kept, pruned = self.choose(g)
        both = [part.group(g, weighted=self.weighted) for part in (self.sums.fit, self.sums.held)]
        for seen, unseen in zip(*both, strict=True):
            yield rotary.pair_system(seen, kept, pruned), rotary.pair_system(unseen, kept, pruned)

    def plan(self, g: int, ridge: float, _fits: dict[Any, Any]) -> Part:
        kept, pruned = self.choose(g)
        moments = self.whole.group(g, weighted=self.weighted)
        judged = self.recipe.compensate == "full" and held_out(self.sums)
        unseen = [_judge_pairs(*pair, ridge) for pair in self.systems(g)] if judged else [(None, None)] * len(moments)
        costs = []
        for A, shares in zip(moments, unseen, strict=True):
            system = rotary.pair_system(A, kept, pruned)
            fit = fit_turned(system, self.recipe.compensate, ridge)
            costs.append(GroupCost(*rotary.distortion(system, fit), rotary.logit_energy(A), *shares))
        return [*kept.tolist(), *(kept + moments.shape[-1] // 2).tolist()], together(costs)


def _judge_pairs(seen: rotary.PairSystem, unseen: rotary.PairSystem, ridge: float) -> Shares:
    fit = rotary.fit_pairs(seen, ridge=ridge)
    return _share(rotary.error(seen, fit), seen.T), _share(rotary.error(unseen, fit), unseen.T)


class _Dimensions:
    """Dimensions that are not rotated: `keep` of every key head, the same for the query heads that share it."""

    def __init__(self, sums: SiteSums[Grams], site: AttentionSite, keep: int, recipe: Recipe) -> None:
        self.sums, self.keep, self.recipe = sums, keep, recipe
        self.shared, self.first = site.heads // site.groups, site.rotary_dims
        self.whole = sums.all
        self.choose = cache(self._choose)

    def heads(self, g: int) -> range:
        return range(g * self.shared, (g + 1) * self.shared)

    def _choose(self, g: int) -> tuple[Tensor, Tensor]:
        with stage("rank"):
            energies = [self.whole.head(h).energy().diagonal() for h in self.heads(g)]
            return rank.top(torch.stack(energies).sum(0), self.keep)

    def kept(self, g: int) -> list[int]:
        return [self.first + i for i in self.choose(g)[0].tolist()]

    def systems(self, g: int) -> Iterator[tuple[logit.LogitSystem, logit.LogitSystem]]:
        kept, pruned = self.choose(g)
        for h in self.heads(g):
            seen, unseen = (head_system(part.head(h), kept, pruned) for part in (self.sums.fit, self.sums.held))
            yield seen, unseen

    def plan(self, g: int, ridge: float, fits: dict[Any, Any]) -> Part:
        kept, pruned = self.choose(g)
        judged = self.recipe.compensate == "full" and held_out(self.sums)
        unseen = [_judge_head(*pair, ridge) for pair in self.systems(g)] if judged else [(None, None)] * self.shared
        costs = []
        for h, shares in zip(self.heads(g), unseen, strict=True):
            head = self.whole.head(h)
            with stage("compensate"):  # apply takes it over
                system = head_system(head, kept, pruned)
                M = fit_head(system, self.recipe.compensate, ridge)
                if self.recipe.compensate == "full":  # what another plan finds under this key must mean the same
                    fits[h, tuple(kept.tolist()), ridge] = M
            costs.append(GroupCost(*logit.distortion(system, M), float(head.energy().sum()), *shares))
        return [self.first + i for i in kept.tolist()], together(costs)


def _judge_head(seen: logit.LogitSystem, unseen: logit.LogitSystem, ridge: float) -> Shares:
    M = fit_head(seen, "full", ridge)
    return _share(logit.error(seen, M), seen.T), _share(logit.error(unseen, M), unseen.T)


class _Subspaces(_Dimensions):
    """The same as the best subspace: numbered, not named, so that what is kept are always the first."""

    def kept(self, g: int) -> list[int]:
        return [self.first + i for i in range(self.keep)]

    def start(self, g: int, ridge: float) -> subspace.Subspace:
        """The fit without its exact steps, which are most of the work."""
        return fit_group(self.whole, self.heads(g), self.keep, "none", ridge)

    def plan(self, g: int, ridge: float, fits: dict[Any, Any]) -> Part:
        with stage("compensate"):
            fit = fit_group(self.whole, self.heads(g), self.keep, self.recipe.compensate, ridge)
            if self.recipe.compensate == "full":
                fits[g, self.keep, ridge] = fit
        unseen = None
        if self.recipe.compensate == "full" and held_out(self.sums):
            unseen = fit_group(self.sums.fit, self.heads(g), self.keep, "full", ridge)
        costs = []
        for i, h in enumerate(self.heads(g)):
            head = self.whole.head(h, centred=True)
            cost = subspace.distortion(head, fit.A[i], fit.B)
            shares: Shares = None, None
            if unseen is not None:
                both = [part.head(h, centred=True) for part in (self.sums.fit, self.sums.held)]
                lost = (subspace.dropped(part, self.keep) for part in both)
                left = (subspace.error(part, unseen.A[i], unseen.B) for part in both)
                seen_share, held_share = (_share(e, T) for e, T in zip(left, lost, strict=True))
                shares = seen_share, held_share
            costs.append(GroupCost(*cost, float(head.energy().sum()), *shares))
        return [self.first + i for i in range(self.keep)], together(costs)


def fit_group(grams: Grams, heads: range, keep: int, compensate: str, ridge: float) -> subspace.Subspace:
    """The subspace of query heads that share their keys, of which only what softmax notices is fitted."""
    sums = [grams.head(h, centred=True) for h in heads]
    return subspace.fit_subspace(sums, keep, ridge=ridge, sweeps=int(compensate == "full"))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def together(costs: Sequence[GroupCost]) -> GroupCost:
    """The cost of what is kept together; shares are weighted by what was lost."""
    if len(costs) == 1:
        return costs[0]
    J, J_star, lost, energy = (sum(getattr(c, name) for c in costs) for name in ("J", "J_star", "J_uncomp", "energy"))
    rho2 = min(1.0, max(0.0, 1 - J_star / lost)) if lost > 0 else 1.0
    unseen = []
    for name in ("fit", "held"):
        known = [(getattr(c, name), c.J_uncomp) for c in costs if getattr(c, name) is not None]
        weight = sum(w for _, w in known)
        unseen.append(sum(x * w for x, w in known) / weight if weight > 0 else None)
    return GroupCost(J, J_star, lost, rho2, energy, *unseen)
