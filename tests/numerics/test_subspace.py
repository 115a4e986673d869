"""Subspaces of queries and keys, against least squares on all logits of all samples, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.head_grams import HeadGrams
from corp.errors import StatisticsError
from corp.numerics import logit, subspace
from corp.numerics.rank import strongest, top
from tests.helpers.seeds import seeded

N, TOKENS, D, KEEP = 7, 11, 6, 3


def samples(heads: int) -> tuple[Tensor, Tensor]:
    """Queries (heads, N, n, d) of heads that share the keys (N, n, d): correlated, mean != 0, sample by sample."""
    generator = seeded(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = draw(heads, N, TOKENS, D) @ draw(heads, 1, D, D) + draw(heads, N, 1, D)
    k = draw(N, TOKENS, D) @ draw(D, D) * draw(N, 1, D).exp() + 3 * draw(N, 1, D)
    return q, k


def grams_of(q: Tensor, k: Tensor, *, folded: bool = False) -> list[HeadGrams]:
    """The centred sums of every query head."""
    together = Grams(len(q), D)
    keys = k.repeat(1, 1, len(q))
    queries = torch.cat(list(q), -1)
    together.update(queries[:3], keys[:3])
    if folded:
        together.fold()
    together.update(queries[3:], keys[3:])
    if folded:
        together.fold()
    return [together.head(h, centred=True) for h in range(len(q))]


def centred(k: Tensor) -> Tensor:
    return k - k.mean(1, keepdim=True)


def logit_error(q: Tensor, k: Tensor, A: Tensor, B: Tensor) -> float:
    """What is left of all logits, each row free to move by a constant."""
    missing = q @ k.mT - (q @ A.mT) @ (k @ B.mT).mT  # (N, n, n)
    return float((missing - missing.mean(-1, keepdim=True)).square().sum())


def best_queries(q: Tensor, k: Tensor, B: Tensor, lam: float = 0.0, start: Tensor | None = None) -> Tensor:
    """A (r, d) by least squares on every logit; the ridge as further rows, pulling to `start`."""
    k = centred(k)
    design = torch.cat([torch.kron(kb @ B.mT, qb) for qb, kb in zip(q, k, strict=True)])  # keys by queries
    target = torch.cat([(qb @ kb.mT).mT.reshape(-1) for qb, kb in zip(q, k, strict=True)])
    start = torch.zeros(len(B), D, dtype=torch.float64) if start is None else start
    rows = lam**0.5 * torch.eye(start.numel(), dtype=torch.float64)
    design, target = torch.cat([design, rows]), torch.cat([target, lam**0.5 * start.reshape(-1)])
    return torch.linalg.lstsq(design, target[:, None]).solution.reshape(start.shape)


@pytest.mark.parametrize("folded", [False, True])
def test_error_is_that_of_all_logits_up_to_a_constant_per_row(folded: bool) -> None:
    (q,), k = samples(1)
    (head,) = grams_of(q[None], k, folded=folded)
    A, B = torch.randn(2, KEEP, D, dtype=torch.float64)
    assert subspace.error(head, A, B) == pytest.approx(logit_error(q, k, A, B), rel=1e-9)


def test_if_all_samples_are_alike_the_start_is_the_best_of_its_rank() -> None:
    (q,), k = samples(1)
    q, k = q[:1].expand(N, -1, -1), k[:1].expand(N, -1, -1)
    (head,) = grams_of(q[None], k)
    whole = subspace.nested([head])
    torch.testing.assert_close(whole.A[0].mT @ whole.B, torch.eye(D, dtype=torch.float64))
    logits = q[0] @ centred(k)[0].mT
    tail = N * torch.linalg.svdvals(logits).square().flip(0).cumsum(0).flip(0)  # Eckart and Young
    for keep in range(1, D):
        A, B = whole.A[0, :keep], whole.B[:keep]
        assert logit_error(q, k, A, B) == pytest.approx(float(tail[keep]), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("ridge", [1e-3, 0.4, 1.0])
@pytest.mark.parametrize("shared", [1, 2])
def test_steps_equal_brute_force_ridge(shared: int, ridge: float) -> None:
    q, k = samples(shared)
    fit = subspace.fit_subspace(grams_of(q, k), KEEP, ridge=ridge)
    start = subspace.nested(grams_of(q, k))
    A, B = start.A[:, :KEEP], start.B[:KEEP]
    k_c = centred(k)
    # Keys: the roles are swapped, and all heads speak at once.
    design = torch.cat([torch.kron(qb @ A[h].mT, kb) for h in range(shared) for qb, kb in zip(q[h], k_c, strict=True)])
    target = torch.cat([(qb @ kb.mT).reshape(-1) for h in range(shared) for qb, kb in zip(q[h], k_c, strict=True)])
    lam = ridge * float(design.square().sum(0).mean())
    rows = lam**0.5 * torch.eye(KEEP * D, dtype=torch.float64)
    stacked, wanted = torch.cat([design, rows]), torch.cat([target, lam**0.5 * B.reshape(-1)])
    B = torch.linalg.lstsq(stacked, wanted[:, None]).solution.reshape(KEEP, D)
    for h in range(shared):
        design = torch.cat([torch.kron(kb @ B.mT, qb) for qb, kb in zip(q[h], k_c, strict=True)])
        lam = ridge * float(design.square().sum(0).mean())
        torch.testing.assert_close(fit.A[h].mT @ fit.B, best_queries(q[h], k, B, lam, A[h]).mT @ B)


def test_sweeps_lower_the_error_below_the_start_and_below_compensated_coordinates() -> None:
    (q,), k = samples(1)
    (head,) = grams_of(q[None], k)
    whole = subspace.nested([head])
    found = [logit_error(q, k, whole.A[0, :KEEP], whole.B[:KEEP])]
    for sweeps in (1, 2, 6):
        fit = subspace.fit_subspace([head], KEEP, ridge=0.0, sweeps=sweeps)
        found.append(logit_error(q, k, fit.A[0], fit.B))
    assert found == sorted(found, reverse=True)
    kept, pruned = top(head.energy().diagonal(), KEEP)
    system = logit.logit_system(head.normal_of(kept), head.cross_of(kept, pruned), head.energy(), pruned)
    assert found[1] < logit.error(system, logit.best_logit(system))


@pytest.mark.parametrize("folded", [False, True])
def test_distortion_equals_brute_force(folded: bool) -> None:
    (q,), k = samples(1)
    (head,) = grams_of(q[None], k, folded=folded)
    (A,), B, _ = subspace.fit_subspace([head], KEEP, ridge=0.3)
    found = subspace.distortion(head, A, B, strongest([head.energy()], KEEP)[1])
    assert pytest.approx(logit_error(q, k, A, B), rel=1e-9) == found.J
    assert found.J_star == found.J
    strength = [float(sum(qb[:, j].norm() ** 2 * kb[:, j].norm() ** 2 for qb, kb in zip(q, centred(k), strict=True)))
                for j in range(D)]  # fmt: skip
    kept = sorted(sorted(range(D), key=strength.__getitem__)[-KEEP:])
    rows = torch.eye(D, dtype=torch.float64)[kept]
    assert found.J_uncomp == pytest.approx(logit_error(q, k, rows, rows), rel=1e-9)
    assert found.J_uncomp > found.J


def test_balancing_changes_no_logit_and_makes_both_sides_equal() -> None:
    A, B = 100 * torch.randn(2, KEEP, D, dtype=torch.float64), torch.randn(KEEP, D, dtype=torch.float64)
    even = subspace.balanced(subspace.Subspace(A, B))
    torch.testing.assert_close(even.A.mT @ even.B, A.mT @ B)
    torch.testing.assert_close(sum(a @ a.mT for a in even.A), even.B @ even.B.mT)


def test_keys_that_do_not_vary_in_a_direction_leave_a_finite_fit() -> None:
    (q,), k = samples(1)
    k = torch.cat([k[..., : D - 1], k[:, :1, D - 1 :].expand(-1, TOKENS, -1)], -1)  # the last is constant per sample
    (head,) = grams_of(q[None], k)
    for ridge in (0.0, 1e-3):
        fit = subspace.fit_subspace([head], D - 1, ridge=ridge)
        scale = float(head.energy().sum())
        assert logit_error(q, k, fit.A[0], fit.B) < 1e-6 * scale


def test_keys_of_which_only_rounding_errors_vary_leave_the_start() -> None:
    class Noise:
        """Sums whose trace rounding made negative."""

        def apply(self, X: Tensor) -> Tensor:
            return -1e-12 * X

        def factors(self) -> tuple[Tensor, Tensor]:
            return -1e-12 * torch.eye(D), torch.eye(KEEP)

        def single(self) -> Noise:
            return self

    residual = torch.ones(D, KEEP)
    for ridge in (0.0, 1e-3):
        change, used = subspace._step(Noise(), residual, ridge, None)
        assert not change.any()
        assert used == ridge  # nothing was raised


def test_folded_sums_give_the_same_subspace_and_survive_a_file() -> None:
    q, k = samples(2)
    single, folded = grams_of(q, k), grams_of(q, k, folded=True)
    fits = [subspace.fit_subspace(heads, KEEP, ridge=1e-3) for heads in (single, folded)]
    torch.testing.assert_close(fits[0].A.mT @ fits[0].B, fits[1].A.mT @ fits[1].B)
    grams = Grams(1, D)
    grams.update(q[0], k)
    grams.fold()
    state = grams.state()
    again = Grams.from_state(1, D, state)
    assert torch.equal(again.head(0, centred=True).cross(), grams.head(0, centred=True).cross())
    with pytest.raises(StatisticsError, match="one of the two sums"):
        Grams.from_state(1, D, {name: t for name, t in state.items() if name != "centred_kron"})
