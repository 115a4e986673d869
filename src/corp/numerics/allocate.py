"""Allocation of a budget over sites by marginal gain.

Every site i has a curve c_i(w), the (weighted) error if it keeps w of its channels or dimensions, and a cost u_i(w),
usually a price per unit kept. The widths that minimise sum_i c_i(w_i) within sum_i u_i(w_i) <= budget are, up to the
last step, those at which another unit of budget gains the same at every site: on the lower convex hull of
every curve, error over cost, take the steepest segments first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corp.errors import PlanError

ROUNDING = 1e-9  # relative; sums of prices that differ by less are equal


class Option(NamedTuple):
    """One site of the allocation: its curve and its constraints."""

    errors: Tensor  # (D + 1,): the error at width 0, 1 … D; inf where a width is impossible
    price: float | Tensor  # of one unit of width; or (D + 1,), the cost of width 0, 1 … D, never falling
    floor: int = 1
    ceiling: int | None = None  # D by default
    multiple: int = 1

    def cost(self, width: int) -> float:
        return float(self.price[width]) if isinstance(self.price, Tensor) else self.price * width


def share(options: Sequence[Option], budget: float) -> list[int]:
    """The width of every site: a multiple of the site's `multiple`, or its ceiling, and at least its floor.

    What the steepest segments leave over is spent on single steps that still fit, the best per price first. Ties go to
    the earlier site.
    """
    allowed = [allowed_widths(option, number) for number, option in enumerate(options)]
    widths = [choice[0] for choice in allowed]
    left = budget - sum(option.cost(w) for option, w in zip(options, widths, strict=True))
    if left < -ROUNDING * budget:
        least = budget - left
        raise PlanError(f"the smallest widths cost {least:g}, the budget is {budget:g}; lower the floors or raise it")
    segments = []
    for i, (option, choice) in enumerate(zip(options, allowed, strict=True)):
        points = [(option.cost(w), float(option.errors[w])) for w in choice]
        hull = [choice[number] for number in lower_hull(points)]
        segments += [(-_worth(option, hull[n], hull[n + 1]), i, n, hull[n + 1]) for n in range(len(hull) - 1)]
    closed: set[int] = set()
    for _, i, _, high in sorted(segments):
        price = options[i].cost(high) - options[i].cost(widths[i])
        # Later segments of a site need its earlier ones: if one does not fit, the later ones are skipped too.
        if i in closed or price > left + ROUNDING * budget:
            closed.add(i)
            continue
        widths[i] = high
        left -= price
    return _fill(options, allowed, widths, left, ROUNDING * budget)


def _fill(
    options: Sequence[Option], allowed: Sequence[Sequence[int]], widths: list[int], left: float, slack: float
) -> list[int]:
    """Spend what is left on steps to any larger width that fits, as long as one lowers an error."""
    while True:
        steps = [
            (_worth(option, widths[i], w), -i, -w)
            for i, (option, choice) in enumerate(zip(options, allowed, strict=True))
            for w in choice
            if w > widths[i] and option.cost(w) - option.cost(widths[i]) <= left + slack
        ]
        best = max(steps, default=(0.0, 0, 0))
        if best[0] <= 0:
            return widths
        i, w = -best[1], -best[2]
        left -= options[i].cost(w) - options[i].cost(widths[i])
        widths[i] = w


def allowed_widths(option: Option, number: int = 0) -> list[int]:
    """The allowed widths, ascending; `number` identifies the site in errors."""
    width = len(option.errors) - 1
    ceiling = width if option.ceiling is None else option.ceiling
    priced = isinstance(option.price, Tensor) or option.price > 0
    if not (1 <= option.floor <= ceiling <= width and option.multiple >= 1 and priced):
        raise PlanError(
            f"site {number}: floor {option.floor}, ceiling {ceiling}, multiple {option.multiple} and price "
            f"{option.cost(1):g} do not fit {width} channels; they must satisfy 1 <= floor <= ceiling <= {width}"
        )
    first = -(-option.floor // option.multiple) * option.multiple
    choice = [*range(first, ceiling, option.multiple), ceiling]
    possible = [w for w in choice if bool(torch.isfinite(option.errors[w]))]
    if not possible:
        raise PlanError(f"site {number}: its error is unknown at all widths between {option.floor} and {ceiling}")
    return possible


def lower_hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of the points (x, y), x never falling, are on their lower convex hull; for equal x, the last one."""
    hull: list[int] = []
    for number, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):  # the middle one is below the line between the others
                break
            hull.pop()
        hull.append(number)
    return hull


def _worth(option: Option, low: int, high: int) -> float:
    """The reduction of the error per cost from one width to a larger one; infinite if that costs nothing."""
    gain, paid = float(option.errors[low] - option.errors[high]), option.cost(high) - option.cost(low)
    return gain / paid if paid > 0 else math.inf if gain > 0 else 0.0
