"""Plans of rotated query and key dimensions, in pairs: what every key head keeps, how query heads are corrected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.io.observer import timed
from corp.numerics import rank, rotary
from corp.planning.fitting import fit_rotated, split
from corp.planning.parts import Maps, Part, Shares, held_out, share, together
from corp.planning.site_plan import GroupCost
from corp.recipe import Recipe


class Pairs(Part):
    """The rotated dimensions of all heads: `keep` pairs of every key head, and a correction of every query head."""

    def __init__(
        self, sums: SiteSums[PairSums], keep: int, recipe: Recipe, given: Sequence[Tensor] | None = None
    ) -> None:
        self.sums, self.keep, self.recipe, self.given = sums, keep, recipe, given
        self.whole = sums.total()
        self.weighted = recipe.weighs_pairs
        self.choose, self.fits = cache(self._choose), cache(self._fits)  # both the maps and the cost need them

    def _choose(self, g: int) -> tuple[Tensor, Tensor]:
        if self.given is not None:
            return self.given[g], split(self.whole.width // 2, self.given[g])
        moments = self.whole.group(g, weighted=self.weighted)  # (R, d, d)
        with timed("rank"):
            if self.weighted:
                return rotary.eliminate(moments, self.keep)
            return rank.top(torch.stack([rotary.pair_energy(A) for A in moments]).sum(0), self.keep)

    def _fits(self, g: int) -> list[tuple[rotary.PairSystem, Tensor]]:
        """The system and the solution (a, b) of every query head."""
        with timed("compensate"):
            systems = [rotary.pair_system(A, *self.choose(g)) for A in self.whole.group(g, weighted=self.weighted)]
            return [(system, fit_rotated(system, self.recipe.compensate, self.recipe.ridge)) for system in systems]

    def kept(self, g: int) -> list[int]:
        first = self.choose(g)[0]
        return [*first.tolist(), *(first + self.whole.width // 2).tolist()]

    def maps(self, g: int) -> Maps:
        kept, width = self.choose(g)[0], self.whole.width
        return Maps([rotary.pair_map(kept, width, fit) for _, fit in self.fits(g)], rotary.pair_map(kept, width))

    def cost(self, g: int) -> GroupCost:
        moments = self.whole.group(g, weighted=self.weighted)
        unseen = (
            self._judge(g)
            if self.recipe.compensate == "full" and held_out(self.sums)
            else [(None, None)] * len(moments)
        )
        return together(
            [
                GroupCost(*rotary.distortion(system, fit), rotary.logit_energy(A), *shares)
                for A, (system, fit), shares in zip(moments, self.fits(g), unseen, strict=True)
            ]
        )

    def _judge(self, g: int) -> list[Shares]:
        """The unexplained shares of every query head on fitted and on held-out samples, of a fit without the latter."""
        found: list[Shares] = []
        both = [part.group(g, weighted=self.weighted) for part in (self.sums.fit, self.sums.held)]
        for pair in zip(*both, strict=True):
            seen, unseen = (rotary.pair_system(A, *self.choose(g)) for A in pair)
            fit = rotary.fit_pairs(seen, ridge=self.recipe.ridge)
            found.append((share(rotary.error(seen, fit), seen.T), share(rotary.error(unseen, fit), unseen.T)))
        return found
