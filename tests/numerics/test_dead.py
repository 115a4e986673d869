"""What is dead, or was pruned before, costs nothing and breaks nothing, with a ridge or without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.head_grams import HeadGrams
from corp.numerics import affine, exact, logit, rotary, subspace, values
from corp.numerics.rank import strongest
from tests.helpers.seeds import seeded

D, KEPT, PRUNED = 6, torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])
RIDGES = pytest.mark.parametrize("ridge", [0.0, 1e-3])


def moments(dead: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """W (4, D), mean and covariance of correlated channels, of which some are always 0."""
    generator = seeded(1)
    x = torch.randn(90, D, generator=generator, dtype=torch.float64).cumsum(1) + 1
    x[:, dead] = 0
    W = torch.randn(4, D, generator=generator, dtype=torch.float64)
    return W, x.mean(0), torch.cov(x.mT, correction=0)


@RIDGES
def test_a_dead_mlp_goes_for_free(ridge: float) -> None:
    W, mean, cov = moments(list(range(D)))
    given = affine.removal(W, mean, cov, KEPT, PRUNED)
    for fit in (affine.fit_affine(given, ridge=ridge), affine.best_affine(given)):
        assert not fit.V.any()
        assert not fit.c.any()
        assert affine.distortion(given, fit) == (0, 0, 0, 1)
    path = exact.elimination_path(W, cov, ridge=ridge, least=2)
    assert sorted(path.order.tolist()) == list(range(D))
    assert path.error.tolist() == [0, 0, 0, 0, torch.inf, torch.inf]


@RIDGES
@pytest.mark.parametrize("dead", [[3], [2], [0, 2, 5], [1, 3, 4], [1, 2]])
def test_dead_channels_predict_nothing_and_go_first(dead: list[int], ridge: float) -> None:
    W, mean, cov = moments(dead)
    fit = affine.fit_affine(affine.removal(W, mean, cov, KEPT, PRUNED), ridge=ridge)
    live = [i for i in KEPT.tolist() if i not in dead]
    lam = ridge * float(cov.diagonal().mean())
    regular = cov[live][:, live] + lam * torch.eye(len(live), dtype=torch.float64)
    expected = torch.zeros(D, len(PRUNED), dtype=torch.float64)
    expected[live] = torch.linalg.solve(regular, cov[live][:, PRUNED])
    torch.testing.assert_close(fit.V, W[:, PRUNED] @ expected[KEPT].mT)
    path = exact.elimination_path(1000 * W, cov, ridge=ridge)  # a ridge must not make large weights look dear
    assert sorted(path.order[: len(dead)].tolist()) == sorted(dead)
    assert path.error[: len(dead)].tolist() == [0] * len(dead)
    assert path.ridge == ridge


def test_dead_channels_that_must_stay_are_the_last() -> None:
    W, _, cov = moments([0, 1, 2, 3])
    path = exact.elimination_path(W, cov, least=3)
    assert path.order[:3].tolist() == [0, 1, 2]
    assert path.error[:3].tolist() == [0, 0, 0]
    assert path.keep(3)[0].tolist() == [3, 4, 5]


def heads(dead: list[int], sides: str, *, folded: bool) -> list[HeadGrams]:
    generator = seeded(2)
    q, k = torch.randn(2, 5, 8, D, generator=generator, dtype=torch.float64)
    for x in [x for side, x in (("q", q), ("k", k)) if side in sides]:
        x[..., dead] = 0
    grams = Grams(1, D)
    grams.update(q, k)
    if folded:
        grams.fold()
    return [grams.head(0, centred=centred) for centred in (False, True)]


@RIDGES
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_a_dead_head_goes_for_free(sides: str, folded: bool, ridge: float) -> None:
    for head in heads(list(range(D)), sides, folded=folded):
        system = logit.logit_system(head.normal_of(KEPT), head.cross_of(KEPT, PRUNED), head.energy(), PRUNED)
        M = logit.fit_logit(system, ridge=ridge)
        assert not M.any()
        assert logit.distortion(system, M) == (0, 0, 0, 1)
        fit = subspace.fit_subspace([head], 3, ridge=ridge)
        assert bool(torch.isfinite(fit.A).all() and torch.isfinite(fit.B).all())
        assert float(fit.B.abs().max()) < 1e3  # it is folded into weights of the model's precision
        assert subspace.distortion(head, fit.A[0], fit.B, strongest([head.energy()], 3)[1]) == (0, 0, 0, 1)


@RIDGES
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dead", [[1, 3], [0, 2], [0, 1]])
def test_dead_dimensions_of_a_head_change_nothing_in_the_fit(dead: list[int], folded: bool, ridge: float) -> None:
    head = heads(dead, "qk", folded=folded)[0]
    system = logit.logit_system(head.normal_of(KEPT), head.cross_of(KEPT, PRUNED), head.energy(), PRUNED)
    M = logit.fit_logit(system, ridge=ridge)
    alive = torch.tensor([int(i) not in dead for i in KEPT])
    assert not M[~alive].any()
    assert not M[:, ~alive].any()
    assert logit.error(system, M) < system.T


@RIDGES
def test_dead_rotary_heads_and_pairs_go_for_free(ridge: float) -> None:
    q, k = torch.randn(2, 12, D, dtype=torch.float64)
    q[:, [1, 4]] = 0  # the pair 1
    A = rotary.pair_moments(q.mT @ q, k.mT @ k)
    kept, pruned = rotary.eliminate(torch.stack([A, torch.zeros_like(A)]), 2)
    assert pruned.tolist() == [1]
    system = rotary.pair_system(A, kept, pruned)
    assert rotary.distortion(system, rotary.fit_pairs(system, ridge=ridge)) == (0, 0, 0, 1)
    whole = rotary.pair_system(torch.zeros_like(A), torch.tensor([0, 1]), torch.tensor([2]))
    assert rotary.distortion(whole, rotary.fit_pairs(whole, ridge=ridge)) == (0, 0, 0, 1)
    partly = rotary.pair_system(A, torch.tensor([0, 1]), torch.tensor([2]))
    ab = rotary.fit_pairs(partly, ridge=ridge)
    assert ab[[1, 3]].tolist() == [0, 0]
    assert rotary.eliminate(torch.zeros(2, 4, D, D, dtype=torch.float64), 2)[0].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("dead", [[0, 1, 2], [0, 1, 2, 3, 4, 5], [4]])
def test_dead_values_have_a_basis_of_ordinary_size(dead: list[int]) -> None:
    W, mean, cov = moments(dead)
    basis = values.value_basis(W, cov, heads=2, groups=2, keep=2, ridge=1e-3)
    torch.testing.assert_close(basis.to @ basis.back, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    rotated = values.rotate(W, mean, cov, basis, 2)
    torch.testing.assert_close(rotated.W @ rotated.mean, W @ mean)
    assert float(basis.to.abs().max()) < 1e3
