"""Rotary Q/K against brute force over every logit, in float64."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.errors import StatisticsError
from corp.numerics import rotary
from tests.helpers.seeds import seeded

P, N, D = 5, 7, 11  # pairs, tokens, model width


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """(n, 2p): token m's pairs, as complex numbers, rotated by m times the frequency."""
    z = torch.complex(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :])
    z = z * torch.polar(torch.ones(1, dtype=x.dtype), torch.arange(len(x))[:, None] * frequencies)
    return torch.cat([z.real, z.imag], -1)


@pytest.fixture
def samples() -> list[tuple[Tensor, Tensor]]:
    """Rotated queries and keys of a few samples; keys depend on queries, so that there is something to predict."""
    generator = seeded(0)
    frequencies = torch.logspace(0, -2, P, dtype=torch.float64)
    mix = torch.randn(2 * P, 2 * P, generator=generator, dtype=torch.float64)
    made = []
    for _ in range(6):
        q = torch.randn(N, 2 * P, generator=generator, dtype=torch.float64) @ mix
        k = torch.randn(N, 2 * P, generator=generator, dtype=torch.float64) + 0.5 * q
        made.append((rotated(q, frequencies), rotated(k, frequencies)))
    return made


def features(q: Tensor, k: Tensor) -> Tensor:
    """(n m, 2p): Re and Im of q_j conj(k_j) of every logit, by the definition."""
    z = torch.complex(q[:, :P], q[:, P:])[:, None] * torch.complex(k[:, :P], k[:, P:]).conj()[None]
    return torch.cat([z.real, z.imag], -1).reshape(-1, 2 * P)


def moments(samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([rotary.pair_moments(q.mT @ q, k.mT @ k) for q, k in samples]).sum(0)


def test_moments_equal_those_of_every_logit(samples: list[tuple[Tensor, Tensor]]) -> None:
    F = torch.cat([features(q, k) for q, k in samples])
    A = moments(samples)
    torch.testing.assert_close(A, F.mT @ F)
    logits = torch.cat([(q @ k.mT).reshape(-1) for q, k in samples])
    torch.testing.assert_close(torch.tensor(rotary.logit_energy(A)), logits.square().sum().float())
    torch.testing.assert_close(F[:, :P].sum(1), logits)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_the_fit_and_its_error_equal_stacked_least_squares(ridge: float, samples: list[tuple[Tensor, Tensor]]) -> None:
    kept, pruned = torch.tensor([0, 2, 3]), torch.tensor([1, 4])
    system = rotary.pair_system(moments(samples), kept, pruned)
    F = torch.cat([features(q, k) for q, k in samples])
    X, y = F[:, torch.cat([kept, kept + P])], F[:, pruned].sum(1)
    lam = ridge * (X.square().sum(0).mean())
    rows = torch.cat([X, lam.sqrt() * torch.eye(6, dtype=X.dtype)])
    expected = torch.linalg.lstsq(rows, torch.cat([y, y.new_zeros(6)])[:, None]).solution[:, 0]
    ab = rotary.fit_pairs(system, ridge=ridge)
    torch.testing.assert_close(ab, expected)
    assert rotary.error(system, ab) == pytest.approx(float((y - X @ expected).square().sum()))
    cost = rotary.distortion(system, ab)
    assert cost.J_uncomp == pytest.approx(float(y.square().sum()))
    assert cost.J_star <= cost.J + 1e-9
    assert cost.rho2 == pytest.approx(1 - cost.J_star / cost.J_uncomp)


def test_folding_before_the_rotation_gives_the_predicted_logits(samples: list[tuple[Tensor, Tensor]]) -> None:
    frequencies = torch.logspace(0, -2, P, dtype=torch.float64)
    x = torch.randn(N, D, dtype=torch.float64)
    W_q, W_k = torch.randn(2, 2 * P, D, dtype=torch.float64)
    b_q = torch.randn(2 * P, dtype=torch.float64)
    q, k = rotated(x @ W_q.mT + b_q, frequencies), rotated(x @ W_k.mT, frequencies)
    kept, pruned = torch.tensor([0, 1, 4]), torch.tensor([2, 3])
    system = rotary.pair_system(rotary.pair_moments(q.mT @ q, k.mT @ k), kept, pruned)
    ab = rotary.fit_pairs(system, ridge=1e-3)
    to_q, to_k = rotary.pair_map(kept, 2 * P, ab), rotary.pair_map(kept, 2 * P)
    q_narrow = rotated(x @ (to_q @ W_q).mT + to_q @ b_q, frequencies[kept])
    narrow = q_narrow @ rotated(x @ (to_k @ W_k).mT, frequencies[kept]).mT
    measured = float((q @ k.mT - narrow).square().sum())
    assert measured == pytest.approx(rotary.error(system, ab))
    assert measured < system.T


def optimal_error(A: Tensor, kept: tuple[int, ...]) -> float:
    chosen = torch.tensor(kept)
    rest = torch.tensor([j for j in range(len(A) // 2) if j not in kept])
    return rotary.distortion(rotary.pair_system(A, chosen, rest), torch.zeros(2 * len(kept), dtype=A.dtype)).J_star


def test_elimination_drops_what_costs_least_at_every_step(samples: list[tuple[Tensor, Tensor]]) -> None:
    heads = torch.stack([moments(samples[:3]), moments(samples[3:])])
    expected = tuple(range(P))
    for keep in range(P - 1, 0, -1):
        options = combinations(expected, keep)
        expected = min(options, key=lambda kept: sum(optimal_error(A, kept) for A in heads))
        kept, pruned = rotary.eliminate(heads, keep)
        assert tuple(kept.tolist()) == expected
        assert sorted([*kept.tolist(), *pruned.tolist()]) == list(range(P))


def test_a_pair_that_repeats_another_is_eliminated_without_loss() -> None:
    q, k = torch.randn(2, 20, 2 * P, dtype=torch.float64)
    for x in (q, k):  # pair 3 is pair 1, rotated by a fixed angle
        z = torch.complex(x[:, 1], x[:, 1 + P]) * torch.polar(torch.tensor(2.0), torch.tensor(0.7)).to(torch.complex128)
        x[:, 3], x[:, 3 + P] = z.real, z.imag
    A = rotary.pair_moments(q.mT @ q, k.mT @ k)
    kept, pruned = rotary.eliminate(A[None], P - 1)
    assert pruned.tolist() in ([1], [3])
    system = rotary.pair_system(A, kept, pruned)
    assert rotary.distortion(system, rotary.fit_pairs(system, ridge=0.0)).J < 1e-8 * system.T


def test_groups_of_heads_are_eliminated_at_once_as_one_by_one() -> None:
    q, k = torch.randn(2, 3, 2, 20, 2 * P, dtype=torch.float64)
    A = rotary.pair_moments(q.mT @ q, k.mT @ k)  # (3, 2, 2p, 2p): three groups of two heads
    both = rotary.eliminate(A, 2)
    for together, alone in zip(both, zip(*(rotary.eliminate(group, 2) for group in A), strict=True), strict=True):
        assert torch.equal(together, torch.stack(alone))


SCALE = 0.3


def pair_sums(q: Tensor, k: Tensor, **options: object) -> PairSums:
    sums = PairSums(q.shape[1], k.shape[1], 2 * P)
    sums.update(q, k, scale=SCALE, **options)  # type: ignore[arg-type]
    return sums


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", [0, 2])
def test_sums_count_the_logits_that_exist_and_the_attention_they_get(
    causal: bool, window: int | None, extra: int
) -> None:
    """As many blocks as tokens make causality exact; heads share keys; padding is no data; `extra` is unrotated."""
    window = window if causal else None
    q = torch.randn(2, 4, N, 2 * P + extra, dtype=torch.float64)
    k = torch.randn(2, 2, N, 2 * P + extra, dtype=torch.float64)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, :2] = False
    mask[1, -3:] = False
    sums = pair_sums(q, k, mask=mask, causal=causal, window=window)
    for h in range(4):
        raw, weighted = torch.zeros(2, 2 * P, 2 * P, dtype=torch.float64)
        for b in range(2):
            tokens = mask[b].nonzero().squeeze(1)
            Q, K = q[b, h][tokens], k[b, h // 2][tokens]
            for m in range(len(Q)):
                last, first = (m + 1, max(0, m + 1 - (window or N))) if causal else (len(K), 0)
                seen = K[first:last]
                F = features(Q[m : m + 1, : 2 * P], seen[:, : 2 * P])
                p = (SCALE * seen @ Q[m]).softmax(0)[:, None]
                raw += F.mT @ F
                F = F - (p * F).sum(0)
                weighted += F.mT @ (p * F)
        torch.testing.assert_close(sums.group(h // 2, weighted=False)[h % 2], raw)
        torch.testing.assert_close(sums.group(h // 2, weighted=True)[h % 2], weighted)
    assert (sums.samples, sums.tokens) == (2, int(mask.sum()))


def test_few_queries_are_evenly_spaced_and_their_attention_alone_is_summed() -> None:
    q, k = torch.randn(2, 4, N, 2 * P, dtype=torch.float64), torch.randn(2, 2, N, 2 * P, dtype=torch.float64)
    sums = pair_sums(q, k, causal=True, queries=2)
    for h in range(4):
        weighted = torch.zeros(2 * P, 2 * P, dtype=torch.float64)
        for b in range(2):
            for m in (N // 4, 3 * N // 4):  # the middle of either half
                seen = k[b, h // 2, : m + 1]
                F = features(q[b, h, m : m + 1], seen)
                p = (SCALE * seen @ q[b, h, m]).softmax(0)[:, None]
                F = F - (p * F).sum(0)
                weighted += F.mT @ (p * F)
        torch.testing.assert_close(sums.group(h // 2, weighted=True)[h % 2], weighted)
    torch.testing.assert_close(sums.raw, pair_sums(q, k, causal=True).raw)  # all logits count there


def test_weighted_errors_are_twice_the_divergence_of_the_attention() -> None:
    """KL of the attention with slightly wrong logits from the true one, to second order."""
    q, k = torch.randn(2, 1, 1, N, 2 * P, dtype=torch.float64)
    A = pair_sums(q, k, causal=True).group(0, weighted=True)[0]
    ab = 1e-4 * torch.randn(2 * P, dtype=torch.float64)
    total = 0.0
    for m in range(N):
        F = features(q[0, 0, m : m + 1], k[0, 0, : m + 1])
        before, after = ((SCALE * x).log_softmax(0) for x in (F[:, :P].sum(1), F[:, :P].sum(1) + F @ ab))
        total += float((before.exp() * (before - after)).sum())
    assert total == pytest.approx(0.5 * SCALE**2 * float(ab @ A @ ab), rel=1e-3)


def test_pair_sums_add_and_survive_a_file() -> None:
    q = torch.randn(6, 4, N, 2 * P, dtype=torch.float64)
    k = torch.randn(6, 2, N, 2 * P, dtype=torch.float64)
    whole = pair_sums(q, k, causal=True)
    parts = pair_sums(q[:2], k[:2], causal=True) + pair_sums(q[2:], k[2:], causal=True)
    torch.testing.assert_close(parts.raw, whole.raw)
    torch.testing.assert_close(parts.weighted, whole.weighted)
    again = PairSums.from_state(4, 2, 2 * P, whole.state())
    assert torch.equal(again.raw, whole.raw)
    assert (again.samples, again.tokens) == (6, 6 * N)
    shapes = {name: tuple(t.shape) for name, t in whole.state().items()}
    assert shapes == {name: PairSums.shapes(4, 2 * P)[name] for name in ("counts", "raw", "weighted")}
    with pytest.raises(StatisticsError, match="cannot be added"):
        _ = whole + PairSums(4, 4, 2 * P)
    with pytest.raises(StatisticsError, match="no samples"):
        PairSums(4, 2, 2 * P).group(0, weighted=True)


@pytest.mark.parametrize("ratio", [100, 1000])
def test_keys_with_a_large_mean_keep_their_weighted_moments_in_float32(ratio: int) -> None:
    q = torch.randn(2, 2, N, 2 * P, dtype=torch.float64)
    k = torch.randn(2, 2, N, 2 * P, dtype=torch.float64) + ratio
    k = k.float().double()
    exact = pair_sums(q, k, causal=True).weighted
    rounded = pair_sums(q.float(), k.float(), causal=True).weighted
    torch.testing.assert_close(rounded, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("seed", range(3))
def test_elimination_equals_refitting_from_scratch_over_many_pairs(seed: int, unit: float) -> None:
    """Correlated pairs, of which one can stand for another: what is left must be known exactly after every step."""
    draw, p = seeded(100 + seed), 9
    F = torch.randn(2, 60, 2 * p, generator=draw, dtype=torch.float64) @ torch.randn(
        2 * p, 2 * p, generator=draw, dtype=torch.float64
    )
    heads = unit * F.mT @ F
    left = list(range(p))
    for keep in range(p - 1, 0, -1):
        costs = {j: sum(regression_error(A, [i for i in left if i != j]) for A in heads) for j in left}
        left.remove(min(costs, key=costs.__getitem__))
        assert rotary.eliminate(heads, keep)[0].tolist() == left


def regression_error(A: Tensor, kept: list[int]) -> float:
    """What the pairs kept leave of the sum of all x, by least squares from the moments."""
    p = len(A) // 2
    features, everything = [*kept, *(j + p for j in kept)], list(range(p))
    cross = A[features][:, everything].sum(1)
    return float(A[:p, :p].sum() - cross @ torch.linalg.solve(A[features][:, features], cross))


def test_a_pairs_energy_is_its_own_share_of_the_logits(samples: list[tuple[Tensor, Tensor]]) -> None:
    x = torch.cat([features(q, k) for q, k in samples])[:, :P]
    torch.testing.assert_close(rotary.pair_energy(moments(samples)), x.square().sum(0))


def test_a_rotation_turns_every_pair_by_its_angle() -> None:
    frequencies, x = torch.logspace(0, -2, P, dtype=torch.float64), torch.randn(3, N, 2 * P, dtype=torch.float64)
    angles = (torch.arange(N)[:, None] * frequencies).repeat(1, 2)
    expected = torch.stack([rotated(part, frequencies) for part in x])
    torch.testing.assert_close(rotary.rotate(x, angles.cos(), angles.sin()), expected)
