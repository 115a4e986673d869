"""Rotated heads under QK-norm: kept pairs with a predicted length, and the least width that predicts it well enough.

The norm divides by the length of the whole head, pruned dimensions included. A narrower norm predicts that length
from the kept ones (numerics.lengths). Corrections of pairs act on normalised heads, so they come after the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.errors import PlanError
from corp.numerics import rotary
from corp.numerics.lengths import Length, fit_length, relative_error, square_error
from corp.planning.pairs import Pairs
from corp.planning.parts import Maps, held_out
from corp.planning.site_plan import GroupCost, NormFold
from corp.recipe import Recipe
from corp.sites import AttentionSite

LIMIT = 0.1  # largest allowed relative error of a predicted length, as the root mean square over tokens


class GroupLengths(NamedTuple):
    """Lengths of the R query heads that share a key head, and of that head."""

    q: list[Length]
    k: Length


def fit_lengths(sums: PairSums, g: int, dims: Tensor, eps: float, ridge: float) -> GroupLengths:
    """Predict the lengths of key head g and of its query heads from the kept `dims`."""
    F_q, F_k = sums.lengths_of(g)
    return GroupLengths([fit_length(F, dims, eps, ridge=ridge) for F in F_q], fit_length(F_k, dims, eps, ridge=ridge))


def square_errors(sums: PairSums, g: int, dims: Tensor, fits: GroupLengths, eps: float) -> tuple[list[float], float]:
    """The mean of (s' / s - 1)^2, of every query head and of the key head."""
    F_q, F_k = sums.lengths_of(g)
    of_queries = [square_error(F, dims, fit, eps) for F, fit in zip(F_q, fits.q, strict=True)]
    return of_queries, square_error(F_k, dims, fits.k, eps)


def length_cost(sums: PairSums, h: int, squares: tuple[float, float], *, weighted: bool) -> float:
    """What wrong lengths of query head h and of its key head add to the squared error of the logits.

    To first order, assuming that the error of a length is independent of the logits that it scales. A query's length
    scales its whole row, a key's one logit of every row, which under attention weights counts with its mean.
    """
    of_query, of_key = squares
    A = (sums.weighted if weighted else sums.raw)[h]
    energy = rotary.logit_energy(A)
    return 0.25 * (of_query * energy + of_key * (float(sums.attended[h]) if weighted else energy))


class NormedPairs(Pairs):
    """Pairs of normalised heads: rows of the weights are only selected, and the norms apply the corrections."""

    def __init__(
        self, sums: SiteSums[PairSums], keep: int, recipe: Recipe, eps: float, given: Sequence[Tensor] | None = None
    ) -> None:
        super().__init__(sums, keep, recipe, given)
        self.eps, self.lengths = eps, cache(self._lengths)

    def _lengths(self, g: int) -> GroupLengths:
        return fit_lengths(self.whole, g, self.dims(g), self.eps, self.recipe.ridge)

    def dims(self, g: int) -> Tensor:
        return torch.tensor(self.kept(g), device=self.whole.raw.device)

    def maps(self, g: int) -> Maps:
        rows, lengths = rotary.pair_map(self.choose(g)[0], self.whole.width), self.lengths(g)
        corrections = tuple(fit for _, fit in self.fits(g))
        return Maps([rows] * len(corrections), rows, NormFold(corrections, tuple(lengths.q), (lengths.k,)))

    def cost(self, g: int) -> GroupCost:
        """The cost of pruned pairs and of predicted lengths; compensation does not reduce the latter."""
        of_queries, of_key = square_errors(self.whole, g, self.dims(g), self.lengths(g), self.eps)
        first, cost = g * len(of_queries), super().cost(g)
        added = sum(
            length_cost(self.whole, first + i, (square, of_key), weighted=self.weighted)
            for i, square in enumerate(of_queries)
        )
        J, J_star, lost = (value + added for value in (cost.J, cost.J_star, cost.J_uncomp))
        return replace(cost, J=J, J_star=J_star, J_uncomp=lost, length=self.worst(g))

    def worst(self, g: int) -> float:
        """The largest relative error of a length in this group, on held-out data if there is any."""
        dims, fitted = self.dims(g), self.sums.fit
        if held_out(self.sums):
            fits, unseen = fit_lengths(fitted, g, dims, self.eps, self.recipe.ridge), self.sums.held
        else:
            fits, unseen = self.lengths(g), self.whole
        of_queries, of_key = square_errors(unseen, g, dims, fits, self.eps)
        return relative_error(max(*of_queries, of_key))


def require_lengths(site: AttentionSite, costs: Sequence[GroupCost]) -> None:
    """Raise an error if pairs that are shared with other attentions do not predict this one's lengths."""
    worst = max(cost.length or 0.0 for cost in costs)
    if worst > LIMIT:
        raise PlanError(
            f"QK-norm divides by the length of the whole head, which the kept dimensions predict only to {worst:.0%} "
            f"({LIMIT:.0%} is the limit); keep more of them, let every head keep pairs of its own with "
            f"rotary='free', or leave it alone with skip=[{site.name!r}]"
        )


def least_width(site: AttentionSite, sums: SiteSums[PairSums], recipe: Recipe) -> int:
    """The fewest dimensions per head with which the lengths of all heads are predicted within LIMIT.

    Found by bisection, because apart from noise the error falls as more is kept.
    """
    assert site.norm is not None
    low, high = 0, site.width // 2  # numbers of pairs: too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        part = NormedPairs(sums, middle, recipe, site.norm.eps)
        good = all(part.worst(g) <= LIMIT for g in range(site.groups))
        low, high = (low, middle) if good else (middle, high)
    return 2 * high
