"""Shares of a budget, against trying everything."""

from __future__ import annotations

from itertools import product

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
