"""Shares of a budget, against trying everything."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from corp.errors import PlanError
from corp.numerics import allocate, exact
from corp.numerics.allocate import Option
from tests.helpers.seeds import seeded


def falling(width: int, seed: int, *, convex: bool) -> Tensor:
    """A curve over the widths 0 … width that ends at 0."""
    steps = torch.rand(width, generator=seeded(seed), dtype=torch.float64)
    steps = steps.sort(descending=True).values if convex else steps
    return torch.cat([steps.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])


def price(options: list[Option], widths: tuple[int, ...] | list[int]) -> float:
    return sum(option.price * w for option, w in zip(options, widths, strict=True))


def error(options: list[Option], widths: tuple[int, ...] | list[int]) -> float:
    return sum(float(option.errors[w]) for option, w in zip(options, widths, strict=True))


def everything(options: list[Option], budget: float) -> list[tuple[int, ...]]:
    """All widths that are allowed and affordable."""
    grids = []
    for option in options:
        ceiling = len(option.errors) - 1 if option.ceiling is None else option.ceiling
        grids.append([w for w in range(option.floor, ceiling + 1) if w % option.multiple == 0 or w == ceiling])
    return [widths for widths in product(*grids) if price(options, widths) <= budget + 1e-9]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("multiple", [1, 2])
def test_convex_curves_at_one_price_are_shared_optimally(seed: int, multiple: int) -> None:
    options = [Option(falling(8, 10 * seed + i, convex=True), 3.0, 2, (6, 8, 8)[i], multiple) for i in range(3)]
    for budget in (30.0, 41.0, 60.0):
        found = allocate.share(options, budget)
        affordable = everything(options, budget)
        assert tuple(found) in affordable
        assert error(options, found) == pytest.approx(min(error(options, widths) for widths in affordable))


@pytest.mark.parametrize("seed", range(8))
def test_any_curves_and_prices_are_shared_as_well_as_hulls_can_tell(seed: int) -> None:
    """Nothing affordable is better by more than the one segment that did not fit; nothing cheaper is better at all."""
    options = [Option(falling(7, 10 * seed + i, convex=False), (1.0, 2.5, 4.0)[i], multiple=(1, 2, 3)[i])
               for i in range(3)]  # fmt: skip
    budget = 24.0
    found = allocate.share(options, budget)
    affordable = everything(options, budget)
    assert tuple(found) in affordable
    best = min(error(options, widths) for widths in affordable)
    largest = max(float(option.errors[1] - option.errors[-1]) for option in options)
    assert best <= error(options, found) <= best + largest
    # No single step that is still affordable would help.
    for i in range(3):
        larger = [w for w in affordable if w[i] > found[i] and all(w[j] == found[j] for j in range(3) if j != i)]
        assert all(error(options, w) >= error(options, found) for w in larger)


def test_a_plateau_before_a_cliff_is_jumped_over() -> None:
    """Widths 1 to 4 are equally bad: a greedy walk by single units would never see what 5 is worth."""
    cliff = torch.tensor([torch.inf, 10, 10, 10, 10, 0, 0], dtype=torch.float64)
    slope = torch.tensor([torch.inf, 5, 4, 3, 2, 1, 0], dtype=torch.float64)
    assert allocate.share([Option(cliff, 1.0), Option(slope, 1.0)], 6.0) == [5, 1]


def test_a_cheap_unit_is_worth_more_than_a_dear_one_that_gains_more() -> None:
    cheap, dear = torch.tensor([torch.inf, 3, 2, 1, 0]).double(), torch.tensor([torch.inf, 6, 4, 2, 0]).double()
    assert allocate.share([Option(dear, 4.0), Option(cheap, 1.0)], 17.0) == [3, 4]  # either fits whole, not both
    assert allocate.share([Option(dear, 4.0), Option(cheap, 4.0)], 20.0) == [4, 1]


def test_floors_ceilings_and_multiples_hold_and_the_whole_width_need_be_none() -> None:
    options = [Option(falling(10, i, convex=True), 1.0, 3, multiple=4) for i in range(2)]
    assert allocate.allowed_widths(options[0]) == [4, 8, 10]
    assert allocate.share(options, 20.0) == [10, 10]
    assert sorted(allocate.share(options, 12.5)) == [4, 8]
    assert allocate.share([option._replace(ceiling=5) for option in options], 100.0) == [5, 5]


def test_ties_go_to_the_earlier_site_and_a_budget_met_exactly_is_met() -> None:
    same = falling(6, 1, convex=True)
    tenth = [Option(same, 0.1), Option(same, 0.1)]
    assert allocate.share(tenth, 0.7) == [4, 3]  # 0.1 * 7 > 0.7 in floating point


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e9])
def test_floors_may_cost_the_budget_up_to_rounding_and_no_more(unit: float) -> None:
    curve = falling(6, 1, convex=True)
    assert allocate.share([Option(curve, 0.1 * unit, 3)], 0.3 * unit) == [3]  # 0.1 * 3 > 0.3 in floating point
    with pytest.raises(PlanError, match="smallest widths cost"):
        allocate.share([Option(curve, 0.1 * unit, 3)], 0.299999 * unit)


def test_impossible_wishes_say_what_to_do() -> None:
    curve = falling(6, 1, convex=True)
    with pytest.raises(PlanError, match=r"cost 8.*budget is 5.*lower the floors"):
        allocate.share([Option(curve, 1.0, 4), Option(curve, 1.0, 4)], 5.0)
    with pytest.raises(PlanError, match=r"site 1: floor 7"):
        allocate.share([Option(curve, 1.0), Option(curve, 1.0, 7)], 5.0)
    unknown = torch.full((3,), torch.inf, dtype=torch.float64)
    with pytest.raises(PlanError, match=r"unknown at all widths between 1 and 2"):
        allocate.share([Option(unknown, 1.0)], 5.0)


def test_an_elimination_path_is_a_curve() -> None:
    generator = seeded(3)
    X = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    W, cov = torch.randn(4, 6, generator=generator, dtype=torch.float64), X.mT @ X / len(X)
    path = exact.elimination_path(W, cov, least=2)
    curve = path.by_width()
    assert curve[:2].tolist() == [torch.inf, torch.inf]
    for width in range(2, 7):
        kept = path.keep(width)[0]
        best = torch.linalg.solve(cov[kept][:, kept], cov[kept] @ W.mT)
        brute = (W @ cov @ W.mT).trace() - (W @ cov[:, kept] @ best).trace()
        assert float(curve[width]) == pytest.approx(float(brute), abs=1e-9)


def test_what_no_segment_takes_goes_in_single_steps_to_the_earlier_site() -> None:
    """Width 5 is on the hull and does not fit: widths below it are still worth what is left."""
    cliff = torch.tensor([torch.inf, 10, 9, 8, 7, 0], dtype=torch.float64)
    for unit in (1e-6, 1.0, 1e6):
        assert allocate.share([Option(cliff, unit), Option(cliff, unit)], 5 * unit) == [4, 1]
        assert allocate.share([Option(unit * cliff, 1.0), Option(unit * cliff, 1.0)], 5.0) == [4, 1]
        assert allocate.share([Option(unit * cliff, 1.0), Option(2 * unit * cliff, 1.0)], 5.0) == [1, 4]


def test_a_price_per_width_is_paid_as_it_is_and_what_costs_nothing_is_taken() -> None:
    """Kernels are as fast at width 2 as at 1, and at 4 as at 3: the wider ones are free."""
    steps = torch.tensor([0.0, 2, 2, 3, 3], dtype=torch.float64)
    slope = torch.tensor([torch.inf, 3, 2, 1, 0], dtype=torch.float64)
    steep = torch.tensor([torch.inf, 9, 6, 3, 0], dtype=torch.float64)
    assert allocate.share([Option(slope, steps), Option(steep, steps)], 4.0) == [2, 2]
    assert allocate.share([Option(slope, steps), Option(steep, steps)], 5.0) == [2, 4]
    assert allocate.share([Option(slope, steps), Option(steep, steps)], 6.0) == [4, 4]


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_what_is_free_and_gains_nothing_is_not_taken(second: float) -> None:
    curve, steps = torch.tensor([torch.inf, 1, second, 0]).double(), torch.tensor([0, 2, 2, 3]).double()
    assert allocate.share([Option(curve, steps)], 2.0) == [1]
    assert allocate.share([Option(curve, steps)], 3.0) == [3]


def test_a_ceiling_that_is_no_multiple_is_a_width_and_floors_are_rounded_up() -> None:
    curve = falling(10, 1, convex=True)
    assert allocate.allowed_widths(Option(curve, 1.0, floor=5, ceiling=9, multiple=3)) == [6, 9]
    assert allocate.allowed_widths(Option(curve, 1.0, floor=4, ceiling=10, multiple=4)) == [4, 8, 10]
    assert allocate.allowed_widths(Option(curve, 1.0, floor=10)) == [10]
    curve[6] = torch.inf
    assert allocate.allowed_widths(Option(curve, 1.0, floor=5, ceiling=9, multiple=3)) == [9]


@pytest.mark.parametrize("wrong", [{"floor": 0}, {"ceiling": 7}, {"multiple": 0}, {"price": 0.0}, {"price": -1.0}])
def test_options_that_cannot_be_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="site 3"):
        allocate.allowed_widths(Option(falling(6, 1, convex=True), 1.0)._replace(**wrong), 3)


def test_the_hull_is_below_every_point() -> None:
    draw = seeded(7)
    x = torch.rand(40, generator=draw, dtype=torch.float64).cumsum(0).tolist()
    y = torch.randn(40, generator=draw, dtype=torch.float64).tolist()
    hull = allocate.lower_hull(list(zip(x, y, strict=True)))
    assert (hull[0], hull[-1]) == (0, 39)
    for a, b in pairwise(hull):
        slope = (y[b] - y[a]) / (x[b] - x[a])
        assert all(y[i] >= y[a] + slope * (x[i] - x[a]) - 1e-12 for i in range(40))  # so also convex
    assert allocate.lower_hull([(0, 2), (1, 1), (2, 0)]) == [0, 2]  # what lies on a segment is no corner
    assert allocate.lower_hull([(0, 2), (1, 1), (1, 0.5), (2, 0)]) == [0, 2, 3]
