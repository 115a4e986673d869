"""The plan of one site: what it keeps, the predicted cost of that, and what planning passes to surgery."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from corp.numerics.affine import Folded
from corp.numerics.lengths import Length
from corp.recipe import COORDINATES

COLUMNS = ("site", "kind", "width", "kept", "asked", "removed", "rho²", "error", "error without compensation")


@dataclass(frozen=True)
class GroupCost:
    """Predicted cost of one group (an MLP, all values of an attention, or one head): see numerics.affine.Distortion.

    MLP and values: expected squared output error per token. Head: squared logit error summed over the calibration
    samples.
    `energy` is the same norm of the full output, so J / energy is a relative error. `fit` and `held` are the shares
    of what was removed that a fit without the held-out data leaves unexplained, on fitted and on held-out data; None
    if nothing was held out or fitted. `length` is the largest relative error of a head's length that a narrower
    QK-norm predicts, as the root mean square over tokens, on held-out data if there is any; None without such a norm.
    """

    J: float
    J_star: float
    J_uncomp: float
    rho2: float
    energy: float
    fit: float | None = None
    held: float | None = None
    length: float | None = None

    @property
    def overfit(self) -> float:
        """How much larger the error is on unseen data: 0.1 means ten percent."""
        if not self.fit or self.held is None:
            return 0.0
        return max(0.0, self.held / self.fit - 1)


class LinearFold(NamedTuple):
    """The layer that consumes a site's channels or values, narrowed and compensated, in the dtype of the model.

    `maps` (e, d) map the rows of every value head to its new ones; an MLP has none.
    """

    folded: Folded
    maps: tuple[Tensor, ...] = ()


class NormFold(NamedTuple):
    """What replaces the norms of queries and keys: predicted lengths, and the corrections of pairs that follow.

    `ab` (e,) of every query head is defined in numerics.rotary.
    """

    ab: tuple[Tensor, ...]
    q: tuple[Length, ...]
    k: tuple[Length, ...]


class HeadMaps(NamedTuple):
    """The maps from the rows of every query head, and of every key head, to its new ones, (e, d) each."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    norm: NormFold | None = None


Fold: TypeAlias = LinearFold | HeadMaps


@dataclass(frozen=True)
class SitePlan:
    """What one site keeps. An MLP has one group of channels, an attention one group of dimensions per head.

    In the basis "subspace" every head is rotated first, and its leading directions, numbered from 0, are kept. The
    output projection adds the heads up, so values have one cost for all of them. `fold` is what planning computed for
    surgery; it is not saved, and surgery computes it from the statistics if it is missing.
    """

    name: str
    kind: str
    width: int  # channels of the dense MLP, or dimensions per dense head
    requested: float
    kept: tuple[tuple[int, ...], ...]
    intercept: bool
    costs: tuple[GroupCost, ...]
    ridge: float = 1e-3  # of the fit
    basis: str = COORDINATES
    fold: Fold | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        content = asdict(replace(self, fold=None))
        del content["fold"]
        content["costs"] = [
            {k: v for k, v in cost.items() if k != "length" or v is not None} for cost in content["costs"]
        ]
        return {**content, "keep": self.keep, "achieved": self.achieved}

    @property
    def keep(self) -> int:
        return len(self.kept[0])

    @property
    def heads(self) -> int | None:
        """How many heads have dimensions of their own; None for an MLP."""
        return None if self.kind == "mlp" else len(self.kept)

    @property
    def achieved(self) -> float:
        return 1 - self.keep / self.width

    def row(self) -> tuple[str, ...]:
        """One line of a table, under COLUMNS."""
        heads = f"{self.heads} x " if self.heads else ""
        shares = (f"{self.requested:.1%}", f"{self.achieved:.1%}")
        errors = (f"{self.relative_error:.2%}", f"{self.relative_uncompensated:.2%}")
        widths = (f"{heads}{self.width}", f"{heads}{self.keep}")
        return self.name, self.kind, *widths, *shares, f"{self.rho2:.3f}", *errors

    @property
    def overfit(self) -> float:
        """The groups' overfitting, weighted by what they lost."""
        lost = sum(c.J_uncomp for c in self.costs)
        return sum(c.overfit * c.J_uncomp for c in self.costs) / lost if lost > 0 else 0.0

    @property
    def length_error(self) -> float | None:
        """The largest relative error of a length that QK-norm divides by; None without such a norm."""
        return max((c.length for c in self.costs if c.length is not None), default=None)

    def indices(self) -> list[Tensor]:
        return [torch.tensor(group, dtype=torch.long) for group in self.kept]

    @property
    def relative_error(self) -> float:
        """Predicted squared error as a share of the site's output energy."""
        return ratio(sum(c.J for c in self.costs), sum(c.energy for c in self.costs))

    @property
    def relative_uncompensated(self) -> float:
        return ratio(sum(c.J_uncomp for c in self.costs), sum(c.energy for c in self.costs))

    @property
    def rho2(self) -> float:
        """Share of what was removed that the kept part can predict (heads weighted by what they lost)."""
        lost = sum(c.J_uncomp for c in self.costs)
        if len(self.costs) == 1 or lost == 0:
            return min(c.rho2 for c in self.costs)
        return sum(c.rho2 * c.J_uncomp for c in self.costs) / lost


def ratio(part: float, whole: float) -> float:
    """`part` as a share of `whole`; 0 of nothing."""
    return part / whole if whole > 0 else 0.0
