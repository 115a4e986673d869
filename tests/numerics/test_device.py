"""Every function works on the device and in the dtype of its inputs, against the float64 result on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from corp.calibration.head_grams import FoldedHead, HeadGrams, SampledHead
from corp.numerics import affine, exact, linalg, logit, redundancy, refit, rotary, subspace, values
from corp.numerics.rank import strongest
from tests.helpers.places import Place
from tests.helpers.seeds import seeded

D, HEADS, KEEP = 12, 3, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def indices(*places: int) -> Tensor:
    return torch.tensor(places, device="cpu")


def layer() -> tuple[Tensor, Tensor, Tensor]:
    """W (5, D), mean (D,) and a covariance of condition about 1e3."""
    x = draw(200, D, seed=1) @ draw(D, D, seed=2)
    cov = x.mT @ x / len(x)
    return draw(5, D, seed=3), x.mean(0), cov + 0.01 * cov.diagonal().mean() * torch.eye(D, dtype=torch.float64)


def head(put: Callable[[Tensor], Tensor], *, folded: bool = False) -> HeadGrams:
    """Sums of 9 samples of 20 tokens in 6 dimensions."""
    q, k = (put(linalg.pack(x.mT @ x)) for x in TOKENS)
    return FoldedHead(6, k.mT @ q) if folded else SampledHead(6, q.mT.contiguous(), k.mT.contiguous())


def pairs(count: int = 2) -> Tensor:
    """A (count, 8, 8) of heads with 4 pairs."""
    q, k = draw(count, 30, 8, seed=6), draw(count, 30, 8, seed=7)
    return rotary.pair_moments(q.mT @ q, k.mT @ k)


LAYER, PAIRS, TOKENS = layer(), pairs(), (draw(9, 20, 6, seed=4), draw(9, 20, 6, seed=5))


def fitted_affine(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    W, mean, cov = (put(x) for x in LAYER)
    kept, pruned = put(indices(*range(7))), put(indices(*range(7, D)))
    given = affine.removal(W, mean, cov, kept, pruned)
    fits = affine.fit_affine(given, ridge=1e-3), affine.best_affine(given)
    assert affine.distortion(given, fits[0]).J >= 0
    return [*fits[0], *fits[1], *affine.fold(W, W[:, 0], kept, fits[0])]


def eliminated(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    W, _, cov = (put(x) for x in LAYER)
    path = exact.elimination_path(W, cov, ridge=1e-3, least=2)
    return [path.order, path.error, path.by_width(), *path.keep(6)]


def fitted_logit(put: Callable[[Tensor], Tensor], sums: HeadGrams) -> list[Tensor]:
    kept, pruned = put(indices(0, 2, 3)), put(indices(1, 4, 5))
    system = logit.logit_system(sums.normal_of(kept), sums.cross_of(kept, pruned), sums.energy(), pruned)
    M = logit.fit_logit(system, ridge=1e-3)
    assert logit.distortion(system, M).J <= system.T
    return [M, logit.best_logit(system), *(logit.head_map(kept, 6, A) for A in logit.query_factors(M))]


def fitted_subspace(_: Callable[[Tensor], Tensor], sums: HeadGrams) -> list[Tensor]:
    fit = subspace.fit_subspace([sums, sums], 3, ridge=1e-3)
    assert subspace.distortion(sums, fit.A[0], fit.B, strongest([sums.energy()], 3)[1]).J >= 0
    return [fit.A.mT @ fit.B]


def fitted_pairs(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    A = put(PAIRS)
    kept, pruned = rotary.eliminate(A, 2)
    system = rotary.pair_system(A[0], kept, pruned)
    ab = rotary.fit_pairs(system, ridge=1e-3)
    assert rotary.distortion(system, ab).J >= 0
    return [kept, pruned, ab, rotary.pair_map(kept, 8, ab), put(rotary.pair_map(kept, 8))]


def in_value_basis(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    W, mean, cov = (put(x) for x in LAYER)
    basis = values.value_basis(W, cov, HEADS, HEADS, KEEP, ridge=1e-3)
    kept = values.kept_inputs([put(indices(*range(KEEP)))] * HEADS, D // HEADS, HEADS)
    leading = basis.to[:, :KEEP]
    rotated = values.rotate(W, mean, cov, basis, HEADS)
    return [kept, leading.mT @ torch.linalg.solve(leading @ leading.mT, leading), rotated.W @ rotated.mean]


def refitted(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    W, mean, cov = (put(x) for x in LAYER)
    moments = refit.GapMoments(mean, cov, W[:, 0], W @ cov, 1.0)
    return [*refit.fit_gap(refit.mixed(moments, moments, 0.5), 1e-3)]


def measured(put: Callable[[Tensor], Tensor], _: HeadGrams) -> list[Tensor]:
    found = redundancy.redundancy(put(LAYER[2]))
    return [put(torch.tensor(list(found), dtype=torch.float64, device="cpu"))]


WORK: list[Any] = [
    fitted_affine, eliminated, fitted_logit, fitted_subspace, fitted_pairs, in_value_basis, refitted, measured,
]  # fmt: skip


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("work", WORK)
def test_results_stay_on_the_device_and_in_the_dtype_of_the_inputs(work: Any, folded: bool, place: Place) -> None:
    expected = work(lambda x: x, head(lambda x: x, folded=folded))
    # A tensor made without naming a device would be a meta tensor here, and fail.
    with torch.device("meta"):
        found = work(place.put, head(place.put, folded=folded))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device.type == place.device.type
        if theirs.is_floating_point():
            assert ours.dtype == place.dtype
            finite = theirs[theirs.isfinite()].abs()
            atol = place.tolerance * float(finite.max())
            torch.testing.assert_close(ours.cpu().double(), theirs, rtol=place.tolerance, atol=atol)
        else:
            assert torch.equal(ours.cpu(), theirs)


def test_positions_in_packed_matrices_are_known_on_every_device() -> None:
    for device in ("cpu", "meta"):
        assert linalg.packed_index(5, torch.device(device)).device.type == device
