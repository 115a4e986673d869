"""The interface of parts of an attention's heads: the dimensions they keep, maps of their rows, and a cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.numerics.affine import explained
from corp.planning.site_plan import GroupCost, NormFold

Shares: TypeAlias = tuple[float | None, float | None]  # of what was removed, unexplained on fitted and on unseen data


class Maps(NamedTuple):
    """The maps from rows of a key head, and of the R query heads that share it, to the kept rows."""

    q: list[Tensor]  # R of (e, d)
    k: Tensor  # (e, d)
    norm: NormFold | None = None  # what replaces the norms of normalised heads


class Part:
    """Some dimensions of every key head: which are kept, how the rows are mapped, and what that costs."""

    @abstractmethod
    def kept(self, g: int) -> list[int]: ...

    @abstractmethod
    def maps(self, g: int) -> Maps: ...

    @abstractmethod
    def cost(self, g: int) -> GroupCost: ...

    def ridge(self, g: int) -> float:
        """The ridge that the group's fit needed, if that is more than requested."""
        return 0.0


def held_out(sums: SiteSums[Grams] | SiteSums[PairSums]) -> bool:
    return sums.fit.samples > 0 and sums.held.samples > 0


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def together(costs: Sequence[GroupCost]) -> GroupCost:
    """The total cost of several groups; shares are weighted by what each lost."""
    if len(costs) == 1:
        return costs[0]
    J, J_star, lost, energy = (sum(getattr(c, name) for c in costs) for name in ("J", "J_star", "J_uncomp", "energy"))
    unseen = []
    for name in ("fit", "held"):
        known = [(getattr(c, name), c.J_uncomp) for c in costs if getattr(c, name) is not None]
        weight = sum(w for _, w in known)
        unseen.append(sum(x * w for x, w in known) / weight if weight > 0 else None)
    return GroupCost(J, J_star, lost, explained(J_star, lost), energy, *unseen)
