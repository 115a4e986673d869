"""Elimination by exact cost against refitting from scratch at every step, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics import exact
from tests.helpers.seeds import seeded

D, OUT = 14, 5


@pytest.fixture
def problem() -> tuple[Tensor, Tensor]:
    generator = seeded(3)
    X = torch.randn(200, D, generator=generator, dtype=torch.float64)
    X = X @ torch.randn(D, D, generator=generator, dtype=torch.float64)
    return torch.randn(OUT, D, generator=generator, dtype=torch.float64), X.mT @ X / len(X)


def error(W: Tensor, cov: Tensor, kept: list[int]) -> float:
    """min over all maps of E ||W x - V x_S||^2."""
    best = torch.linalg.solve(cov[kept][:, kept], cov[kept] @ W.mT)
    return float((W @ cov @ W.mT).trace() - (W @ cov[:, kept] @ best).trace())


@pytest.mark.parametrize(
    ("block", "candidates", "panel"), [(1, 3, 256), (3, 1, 4), (3, 3, 3), (9, 1, 5), (128, 3, 256)]
)
def test_every_step_removes_the_cheapest_and_knows_what_it_cost(
    block: int, candidates: int, panel: int, problem: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BLOCK": block, "CANDIDATES": candidates, "PANEL": panel}.items():
        monkeypatch.setattr(exact, name, value)
    W, cov = problem
    path = exact.elimination_path(W, cov)
    left = list(range(D))
    for removed, predicted in zip(path.order[:-1].tolist(), path.error[:-1].tolist(), strict=True):
        options = {j: error(W, cov, [i for i in left if i != j]) for j in left}
        assert removed == min(options, key=options.__getitem__)
        assert predicted == pytest.approx(options[removed])
        left.remove(removed)
    assert path.order[-1] == left[0]
    assert path.error[-1] == torch.inf


def test_a_shorter_path_is_the_beginning_of_the_whole(problem: tuple[Tensor, Tensor]) -> None:
    whole, short = exact.elimination_path(*problem), exact.elimination_path(*problem, least=8)
    assert torch.equal(whole.order[: D - 8], short.order[: D - 8])
    kept, pruned = short.keep(8)
    assert sorted([*kept.tolist(), *pruned.tolist()]) == list(range(D))
    assert kept.tolist() == sorted(kept.tolist())


def test_redundant_and_dead_channels_go_first_and_cost_nothing(problem: tuple[Tensor, Tensor]) -> None:
    W, cov = problem
    mix = torch.eye(D, dtype=torch.float64)
    mix[3] = mix[1] - 2 * mix[2]  # channel 3 is a combination of two others
    mix[7] = 0  # channel 7 is dead
    cov = mix @ cov @ mix.mT
    path = exact.elimination_path(W, cov)
    assert 7 in path.order[:2].tolist()
    assert set(path.order[:2].tolist()) & {1, 2, 3}
    assert float(path.error[1]) < 1e-6 * float((W @ cov @ W.mT).trace())


def test_it_beats_choosing_by_energy(problem: tuple[Tensor, Tensor]) -> None:
    W, cov = problem
    kept = exact.elimination_path(W, cov).keep(7)[0].tolist()
    by_energy = (cov.diagonal() * W.square().sum(0)).topk(7).indices.tolist()
    assert error(W, cov, kept) < error(W, cov, by_energy)


@pytest.mark.parametrize(("block", "panel"), [(1, 4), (3, 2), (5, 4), (128, 3)])
def test_neither_blocks_nor_panels_change_the_path(
    block: int, panel: int, problem: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exact.elimination_path(*problem, ridge=1e-3)
    monkeypatch.setattr(exact, "BLOCK", block)
    monkeypatch.setattr(exact, "PANEL", panel)
    path = exact.elimination_path(*problem, ridge=1e-3)
    assert torch.equal(path.order, whole.order)
    torch.testing.assert_close(path.error, whole.error)


def test_a_block_ends_before_a_channel_that_was_no_candidate_becomes_the_cheapest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Channels 0 and 1 are almost copies: with either gone, the other is the dearest of all."""
    monkeypatch.setattr(exact, "BLOCK", 2)
    monkeypatch.setattr(exact, "CANDIDATES", 1)
    mix = torch.eye(5, dtype=torch.float64)
    mix[1, :2] = torch.tensor([1.0, 1e-3])
    W = torch.tensor([10.0, 10.0, 1.0, 2.0, 3.0], dtype=torch.float64).diag()
    path = exact.elimination_path(W, mix @ mix.mT)
    assert path.order[0] in (0, 1)
    assert path.order[1:4].tolist() == [2, 3, 4]
    torch.testing.assert_close(path.error[1:4] - path.error[0], torch.tensor([1.0, 5.0, 14.0], dtype=torch.float64))


def test_a_ridge_that_had_to_be_raised_is_told(problem: tuple[Tensor, Tensor]) -> None:
    W, cov = problem
    assert exact.elimination_path(W, cov, ridge=1e-3).ridge == 1e-3
    twice = torch.eye(D, dtype=torch.float64)
    twice[3] = twice[1]
    path = exact.elimination_path(W, twice @ cov @ twice.mT)
    assert path.ridge == 1e-10
    assert path.order[0] in (1, 3)
    assert float(path.error[0]) < 1e-6 * float(path.error[1])


def test_the_inputs_are_left_as_they_were(problem: tuple[Tensor, Tensor]) -> None:
    copies = [x.clone() for x in problem]
    exact.elimination_path(*problem)
    for x, copy in zip(problem, copies, strict=True):
        assert torch.equal(x, copy)


def test_channels_that_stay_are_ordered_by_their_cost_when_the_path_ended(problem: tuple[Tensor, Tensor]) -> None:
    W, cov = problem
    path = exact.elimination_path(W, cov, least=6)
    left = path.order[-6:].tolist()
    costs = [error(W, cov, [i for i in left if i != j]) for j in left]
    assert costs == sorted(costs)
    equal = torch.eye(60, dtype=torch.float64)
    assert exact.elimination_path(equal, equal, least=60).order.tolist() == list(range(60))


@pytest.mark.parametrize("eigenvalue", [-5e-4, 1e-13])
def test_a_covariance_that_rounding_made_indefinite_takes_the_least_ridge_that_works(eigenvalue: float) -> None:
    """A pivot below rounding counts as none: its inverse would drown all others."""
    W = torch.randn(OUT, D, generator=seeded(5), dtype=torch.float64)
    even = torch.full((D, D), 1 / D, dtype=torch.float64)
    path = exact.elimination_path(W, torch.eye(D, dtype=torch.float64) + (eigenvalue - 1) * even)
    assert path.ridge == (1e-3 if eigenvalue < 0 else 1e-10)
    assert bool(torch.isfinite(path.error[:-1]).all())
    assert float(path.error[-2]) <= float(W.square().sum())


@pytest.mark.parametrize("unit", [1.0, 1e-30, 1e30])
def test_many_channels_are_eliminated_in_float32_with_the_same_result(
    unit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, n = seeded(7), 300
    X = torch.randn(900, n, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, n, dtype=torch.float64)
    X[:, 1:] += 0.5 * X[:, :-1]
    W, cov = torch.randn(60, n, generator=generator, dtype=torch.float64), X.mT @ X / len(X)
    slow = exact.elimination_path(W, cov, ridge=1e-3)
    monkeypatch.setattr(exact, "MANY", n)
    fast = exact.elimination_path(W * unit, cov * unit, ridge=1e-3)
    assert torch.equal(fast.order, slow.order)
    torch.testing.assert_close(fast.error / unit**3, slow.error, rtol=1e-6, atol=0)
    assert not torch.equal(fast.error / unit**3, slow.error)
    without = exact.elimination_path(W, cov)  # a ridge this small needs float64
    monkeypatch.undo()
    assert torch.equal(without.error, exact.elimination_path(W, cov).error)


def test_what_is_no_covariance_is_an_error() -> None:
    with pytest.raises(SingularSystemError, match="covariance of 3 channels is not positive definite"):
        exact.elimination_path(torch.ones(1, 3).double(), -torch.ones(3, 3).double() - torch.eye(3).double())
