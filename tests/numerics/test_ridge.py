"""The ridge by held-out error, against fitting and measuring on the data itself, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.numerics import ridge
from corp.numerics.affine import fit_affine, fold
from corp.numerics.logit import LogitSystem, fit_logit, logit_system
from corp.numerics.rotary import PairSystem, fit_pairs, pair_moments, pair_system

D, OUT = 12, 4
kept, pruned = torch.arange(7), torch.arange(7, D)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(0)
    return x.mean(0), centred.mT @ centred / len(x)


def tokens(n: int, seed: int) -> Tensor:
    """Pruned channels that follow the kept ones, with noise."""
    x = draw(n, D, seed=seed)
    x[:, pruned] += 0.7 * x[:, kept] @ draw(7, 5, seed=1)
    return x + 2


@pytest.mark.parametrize("samples", [9, 400])
def test_mlp_errors_are_those_of_the_folded_layer_on_unseen_tokens(samples: int) -> None:
    x, new, W = tokens(samples, 2), tokens(300, 3), draw(OUT, D, seed=4)
    found = ridge.choose_affine(W, moments(x), moments(new), kept, pruned)
    b = torch.zeros(OUT, dtype=torch.float64)
    lost = new[:, pruned] @ W[:, pruned].mT
    whole = float((lost - lost.mean(0)).square().sum())
    for value, share in zip(found.ridges, found.unexplained, strict=True):
        folded = fold(W, b, kept, pruned, fit_affine(*moments(x), kept, pruned, ridge=value))
        missing = new @ W.mT - (new[:, kept] @ folded.W.mT + folded.b)
        assert share == pytest.approx(float(missing.square().sum()) / whole, rel=1e-7)
    best = min(found.unexplained)
    assert found.unexplained[found.ridges.index(found.ridge)] <= best * (1 + ridge.EQUAL)


def test_few_tokens_ask_for_a_larger_ridge_than_many() -> None:
    W, new = draw(OUT, D, seed=4), moments(tokens(2000, 3))
    few, many = (ridge.choose_affine(W, moments(tokens(n, 2)), new, kept, pruned) for n in (9, 20_000))
    assert few.ridge > many.ridge
    assert few.unexplained[few.ridges.index(few.ridge)] < few.unexplained[0]


def test_of_equal_errors_the_larger_ridge_is_taken() -> None:
    """Pruned channels that nothing predicts: every ridge that removes the noise of the fit is as good."""
    x = draw(50, D, seed=6)
    W = draw(OUT, D, seed=4)
    same = moments(torch.cat([x, -x]))
    cov = torch.block_diag(same[1][:7, :7], same[1][7:, 7:])
    found = ridge.choose_affine(W, (same[0], cov), (same[0], cov), kept, pruned)
    assert found.ridge == max(found.ridges)
    assert found.unexplained == pytest.approx([1.0] * len(found.ridges))


def logit_of(q: Tensor, k: Tensor) -> LogitSystem:
    grams = Grams(1, 6)
    grams.update(q, k)
    head = grams.head(0)
    return logit_system(head.kron_of(kept[:4]), head.cross(), head.energy(), kept[:4], torch.tensor([4, 5]))


def test_head_errors_are_those_of_all_logits_of_unseen_samples_summed_over_heads() -> None:
    mix = draw(2, 2, 6, 6, seed=7)
    q, k = (draw(2, 12, 9, 6, seed=8 + side) @ mix[side][:, None] for side in range(2))  # (heads, samples, tokens, d)
    seen = [logit_of(q[h, :4], k[h, :4]) for h in range(2)]
    unseen = [logit_of(q[h, 4:], k[h, 4:]) for h in range(2)]
    found = ridge.choose_system(zip(seen, unseen, strict=True))
    whole = float((q[:, 4:, :, 4:] @ k[:, 4:, :, 4:].mT).square().sum())
    for value, share in zip(found.ridges, found.unexplained, strict=True):
        left = 0.0
        for h in range(2):
            M, Q, K = fit_logit(seen[h], ridge=value), q[h, 4:], k[h, 4:]
            missing = Q[..., 4:] @ K[..., 4:].mT - Q[..., :4] @ M @ K[..., :4].mT
            left += float(missing.square().sum())
        assert share == pytest.approx(left / whole, rel=1e-7)


def test_rotary_systems_are_judged_alike() -> None:
    q, k = draw(2, 6, 9, 8, seed=9)
    moments_of = [sum(pair_moments(a.mT @ a, b.mT @ b) for a, b in zip(q[s], k[s], strict=True)) for s in
                  (slice(0, 3), slice(3, 6))]  # fmt: skip
    systems: list[PairSystem] = [pair_system(A, torch.tensor([0, 1]), torch.tensor([2, 3])) for A in moments_of]
    found = ridge.choose_system([(systems[0], systems[1])])
    for value, share in zip(found.ridges, found.unexplained, strict=True):
        ab = fit_pairs(systems[0], ridge=value)
        z = torch.view_as_complex(torch.stack([q[3:, :, :4], q[3:, :, 4:]], -1))[:, :, None]
        w = torch.view_as_complex(torch.stack([k[3:, :, :4], k[3:, :, 4:]], -1))[:, None]
        products = z * w.conj()  # (b, queries, keys, pairs)
        missing = products.real[..., 2:].sum(-1)
        told = products.real[..., :2] @ ab[:2] + products.imag[..., :2] @ ab[2:]
        assert share == pytest.approx(float((missing - told).square().sum() / missing.square().sum()), rel=1e-7)
