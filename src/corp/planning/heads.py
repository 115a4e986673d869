"""Plans of query and key dimensions, head by head: rotated ones in pairs, the others one by one or as a subspace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.head_grams import HeadGrams
from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.calibration.statistics import Statistics
from corp.io.observer import timed
from corp.numerics import logit, rank, rotary, subspace
from corp.numerics.kronecker import ENOUGH
from corp.planning.fitting import fit_head, head_system, split
from corp.planning.normed import NormedPairs, require_lengths
from corp.planning.pairs import Pairs
from corp.planning.parts import Maps, Part, Shares, held_out, share, together
from corp.planning.site_plan import GroupCost, HeadMaps, NormFold, SitePlan
from corp.planning.widths import rotated_part
from corp.recipe import COORDINATES, SUBSPACE, Recipe
from corp.sites import AttentionSite


class HeadSums(NamedTuple):
    """The sums of an attention's rotated dimensions and of the others, if it has them."""

    pairs: SiteSums[PairSums] | None
    grams: SiteSums[Grams] | None

    @classmethod
    def of(cls, site: AttentionSite, stats: Statistics) -> HeadSums:
        pairs = stats.pairs_of(site.name) if site.rotary else None
        return cls(pairs, stats.grams_of(site.plain_name) if site.plain_width else None)


def plan_attention(
    site: AttentionSite, keep: int, sums: HeadSums, recipe: Recipe, pairs: Tensor | None = None
) -> SitePlan:
    """Choose, fit and predict for every key head of one attention and the query heads that share it.

    `pairs` are the rotary pairs that every head of the model keeps, if they were chosen together.
    """
    parts = _parts(site, keep, sums, recipe, pairs=pairs)
    costs = tuple(together([part.cost(g) for part in parts]) for g in range(site.groups))
    if site.norm is not None and pairs is not None:
        require_lengths(site, costs)
    return _site_plan(site, keep, parts, recipe, costs)


def sketch_attention(
    site: AttentionSite,
    keep: int,
    sums: HeadSums,
    recipe: Recipe,
    nested: Sequence[subspace.Subspace] | None,
    pairs: Tensor | None = None,
) -> SitePlan:
    """Choose and fit for a trial model: without predictions, and with subspaces from their nested maps."""
    return _site_plan(site, keep, _parts(site, keep, sums, recipe, pairs=pairs, nested=nested), recipe, ())


def fold_attention(site: AttentionSite, site_plan: SitePlan, sums: HeadSums, recipe: Recipe) -> HeadMaps:
    """The maps of a plan that does not contain them."""
    chosen = site_plan.indices()
    return _head_maps(site, _parts(site, site_plan.keep, sums, recipe, chosen))


def shared_pairs(sites: Sequence[AttentionSite], keep: int, stats: Statistics, recipe: Recipe) -> Tensor:
    """The rotary pairs that cost least if all heads of these sites keep the same; all heads have equal weight."""
    weighted = recipe.weighs_pairs
    moments = torch.cat([_all_pairs(stats.pairs_of(site.name).total(), weighted) for site in sites])  # (R, d, d)
    energy = torch.tensor([rotary.logit_energy(A) for A in moments], dtype=moments.dtype, device=moments.device)
    alike = moments / energy.clamp(min=torch.finfo(moments.dtype).tiny)[:, None, None]
    if weighted:
        return rotary.eliminate(alike, keep)[0]
    return rank.top(torch.stack([rotary.pair_energy(A) for A in alike]).sum(0), keep)[0]


def _all_pairs(sums: PairSums, weighted: bool) -> Tensor:
    return torch.cat([sums.group(g, weighted=weighted) for g in range(sums.kv_heads)])


def _site_plan(
    site: AttentionSite, keep: int, parts: Sequence[Part], recipe: Recipe, costs: tuple[GroupCost, ...]
) -> SitePlan:
    kept = tuple(tuple(i for part in parts for i in part.kept(g)) for g in range(site.groups))
    asked = 1 - keep / site.width if recipe.has_target else recipe.sparsity("attn", site.name)
    basis, fold = _basis(site, recipe), _head_maps(site, parts)
    ridge = max(recipe.ridge, *(part.ridge(g) for part in parts for g in range(site.groups)))
    return SitePlan(site.name, "attn", site.width, asked, kept, False, costs, ridge, basis, fold)


def _head_maps(site: AttentionSite, parts: Sequence[Part]) -> HeadMaps:
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    norms: list[NormFold] = []
    for g in range(site.groups):
        maps = [part.maps(g) for part in parts]
        queries += [torch.block_diag(*each) for each in zip(*(part.q for part in maps), strict=True)]
        keys.append(torch.block_diag(*(part.k for part in maps)))
        norms += [part.norm for part in maps if part.norm is not None]
    return HeadMaps(tuple(queries), tuple(keys), _joined(norms))


def _joined(norms: Sequence[NormFold]) -> NormFold | None:
    """The norms of all groups as one; None if heads are not normalised."""
    if not norms:
        return None
    return NormFold(*(tuple(chain.from_iterable(parts)) for parts in zip(*norms, strict=True)))


def _basis(site: AttentionSite, recipe: Recipe) -> str:
    return SUBSPACE if recipe.attn_basis == SUBSPACE and site.plain_width else COORDINATES


def _parts(
    site: AttentionSite,
    keep: int,
    sums: HeadSums,
    recipe: Recipe,
    chosen: Sequence[Tensor] | None = None,
    *,
    pairs: Tensor | None = None,
    nested: Sequence[subspace.Subspace] | None = None,
) -> list[Part]:
    """The rotated dimensions, and the others; `chosen` are the dimensions that every group keeps, if known."""
    pairs_kept = rotated_part(site, keep) // 2 if site.rotary else 0
    dims = site.rotary_dims
    parts: list[Part] = []
    if sums.pairs is not None:
        given = None if chosen is None else [kept[kept < dims // 2] for kept in chosen]
        given = given if pairs is None else [pairs] * site.groups
        made = (sums.pairs, pairs_kept, recipe)
        parts.append(NormedPairs(*made, site.norm.eps, given) if site.norm else Pairs(*made, given))
    if sums.grams is not None:
        if _basis(site, recipe) == SUBSPACE:
            parts.append(_Subspaces(sums.grams, site, keep - 2 * pairs_kept, recipe, nested))
        else:
            given = None if chosen is None else [kept[kept >= dims] - dims for kept in chosen]
            parts.append(_Dimensions(sums.grams, site, keep - 2 * pairs_kept, recipe, given))
    return parts


class _Plain(Part):
    """Dimensions that are not rotated: `keep` of every key head, the same for the query heads that share it."""

    def __init__(self, sums: SiteSums[Grams], site: AttentionSite, keep: int, recipe: Recipe, *, centred: bool) -> None:
        self.sums, self.keep, self.recipe = sums, keep, recipe
        self.width, self.first, self.heads = site.plain_width, site.rotary_dims, site.sharing
        self.shared = len(site.sharing(0))
        self.judged = recipe.compensate == "full" and held_out(sums)
        self.head = lru_cache(maxsize=self.shared)(partial(sums.total().head, centred=centred))  # of the group at work


class _Dimensions(_Plain):
    """Single dimensions, compensated by the others; `given` are those of every key head, if they were chosen before."""

    def __init__(
        self, sums: SiteSums[Grams], site: AttentionSite, keep: int, recipe: Recipe, given: Sequence[Tensor] | None
    ) -> None:
        super().__init__(sums, site, keep, recipe, centred=False)
        self.given, self.choose, self.fits = given, cache(self._choose), cache(self._fits)

    def _choose(self, g: int) -> tuple[Tensor, Tensor]:
        if self.given is not None:
            return self.given[g], split(self.width, self.given[g])
        with timed("rank"):
            return rank.strongest([self.head(h).energy() for h in self.heads(g)], self.keep)

    def _fits(self, g: int) -> list[tuple[logit.LogitSystem, Tensor]]:
        with timed("compensate"):
            systems = [head_system(self.head(h), *self.choose(g)) for h in self.heads(g)]
            return [(system, fit_head(system, self.recipe.compensate, self.recipe.ridge)) for system in systems]

    def kept(self, g: int) -> list[int]:
        return [self.first + i for i in self.choose(g)[0].tolist()]

    def maps(self, g: int) -> Maps:
        kept = self.choose(g)[0]
        factors = logit.fold_factors if self.shared == 1 else logit.query_factors
        sides = [factors(M) for _, M in self.fits(g)]
        queries = [logit.head_map(kept, self.width, A) for A, _ in sides]
        return Maps(queries, logit.head_map(kept, self.width, sides[0][1]))

    def cost(self, g: int) -> GroupCost:
        return together(
            [
                GroupCost(
                    *logit.distortion(system, M),
                    float(self.head(h).energy().sum()),
                    *(self._judge(g, h) if self.judged else (None, None)),
                )
                for h, (system, M) in zip(self.heads(g), self.fits(g), strict=True)
            ]
        )

    def _judge(self, g: int, h: int) -> Shares:
        seen, unseen = (head_system(part.head(h), *self.choose(g)) for part in (self.sums.fit, self.sums.held))
        M = fit_head(seen, "full", self.recipe.ridge)
        return share(logit.error(seen, M), seen.T), share(logit.error(unseen, M), unseen.T)


class _Subspaces(_Plain):
    """The best subspace, of which the leading directions are kept; `nested` are its maps for a trial, if known."""

    def __init__(
        self,
        sums: SiteSums[Grams],
        site: AttentionSite,
        keep: int,
        recipe: Recipe,
        nested: Sequence[subspace.Subspace] | None,
    ) -> None:
        super().__init__(sums, site, keep, recipe, centred=True)
        self.nested, self.fit = nested, cache(self._fit)

    def _fit(self, g: int) -> subspace.Subspace:
        with timed("compensate"):
            if self.nested is not None:
                return subspace.leading(self.nested[g], self.keep)
            heads = [self.head(h) for h in self.heads(g)]
            return _fit_heads(heads, self.keep, self.recipe.ridge, self.recipe.compensate == "full")

    def kept(self, g: int) -> list[int]:
        return [self.first + i for i in range(self.keep)]

    def maps(self, g: int) -> Maps:
        fit = self.fit(g)
        return Maps(list(fit.A), fit.B)

    def ridge(self, g: int) -> float:
        return self.fit(g).ridge

    def cost(self, g: int) -> GroupCost:
        fit = self.fit(g)
        unseen = self._judge(g) if self.judged else [(None, None)] * self.shared
        energies = [self.head(h).energy() for h in self.heads(g)]
        pruned = rank.strongest(energies, self.keep)[1]
        costs = []
        for i, h in enumerate(self.heads(g)):
            distortion = subspace.distortion(self.head(h), fit.A[i], fit.B, pruned)
            costs.append(GroupCost(*distortion, float(energies[i].sum()), *unseen[i]))
        return together(costs)

    def _judge(self, g: int) -> list[Shares]:
        """The unexplained shares on fitted and on held-out samples, of a float32 fit without the latter."""
        both = (self.sums.fit, self.sums.held)
        seen, unseen = ([part.head(h, centred=True).single() for h in self.heads(g)] for part in both)
        A, B, _ = _fit_heads(seen, self.keep, self.recipe.ridge, True)

        def left(heads: Sequence[HeadGrams]) -> list[float | None]:
            pruned = rank.strongest([head.energy() for head in heads], self.keep)[1]
            return [
                share(subspace.error(head, a, B), subspace.dropped(head, pruned))
                for head, a in zip(heads, A, strict=True)
            ]

        return list(zip(left(seen), left(unseen), strict=True))


def nested_maps(site: AttentionSite, grams: Grams) -> list[subspace.Subspace]:
    """The maps of every group of heads, without exact steps; their leading rows are the maps of every smaller width."""
    groups = map(site.sharing, range(site.groups))
    return [subspace.nested([grams.head(h, centred=True) for h in group]) for group in groups]


def fit_group(grams: Grams, heads: range, keep: int, ridge: float, *, exact_steps: bool = True) -> subspace.Subspace:
    """The subspace of query heads that share their keys, fitted up to what softmax ignores."""
    return _fit_heads([grams.head(h, centred=True) for h in heads], keep, ridge, exact_steps)


def _fit_heads(sums: Sequence[HeadGrams], keep: int, ridge: float, exact_steps: bool) -> subspace.Subspace:
    return subspace.fit_subspace(sums, keep, ridge=ridge, sweeps=int(exact_steps), tolerance=ENOUGH)
