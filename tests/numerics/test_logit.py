"""Logit compensation, against least squares on all logits of all samples."""

import pytest
import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.numerics import kronecker, logit
from corp.numerics.linalg import pack, packed_index, unpack

kept, pruned = torch.tensor([0, 2, 3]), torch.tensor([1, 4])


@pytest.fixture
def samples() -> tuple[Tensor, Tensor]:  # queries and keys (N, n, d) of one head, correlated, mean != 0
    mix = torch.randn(2, 5, 5, dtype=torch.float64)
    q = torch.randn(6, 9, 5, dtype=torch.float64) @ mix[0] + 0.5
    k = torch.randn(6, 9, 5, dtype=torch.float64) @ mix[1] - 0.3
    return q, k


def system_of(q: Tensor, k: Tensor) -> logit.LogitSystem:
    grams = Grams(1, 5)
    grams.update(q[:2], k[:2])
    grams.update(q[2:], k[2:])
    head = grams.head(0)
    return logit.logit_system(head.normal_of(kept), head.cross_of(kept, pruned), head.energy(), pruned)


def dense(G: kronecker.Operator, m: int, n: int) -> Tensor:
    """The matrix of an operator on (m, n), columns stacked, applied to one entry after the other."""
    units = torch.eye(m * n, dtype=torch.float64).reshape(-1, n, m).mT
    return torch.stack([G.apply(unit).T.reshape(-1) for unit in units])


def design(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of sum_ij M_ij q_i k_j for every sample, query and key; and the missing logits."""
    A = torch.cat([torch.kron(k[b][:, kept], q[b][:, kept]) for b in range(len(q))])
    T = torch.cat([(q[b][:, pruned] @ k[b][:, pruned].T).T.reshape(-1) for b in range(len(q))])
    return A, T


def test_system_equals_the_normal_equations_of_all_logits(samples: tuple[Tensor, Tensor]) -> None:
    A, T = design(*samples)
    system = system_of(*samples)
    torch.testing.assert_close(dense(system.G, 3, 3), A.T @ A)
    torch.testing.assert_close(system.h.T.reshape(-1), A.T @ T)
    assert pytest.approx(float(T @ T)) == system.T
    assert pytest.approx(float((A.T @ A).diagonal().mean())) == system.scale


@pytest.mark.parametrize("ridge", [1e-3, 0.4])
def test_fit_equals_brute_force_ridge_and_predicts_its_error(samples: tuple[Tensor, Tensor], ridge: float) -> None:
    A, T = design(*samples)
    system = system_of(*samples)
    M = logit.fit_logit(system, ridge=ridge)
    lam = ridge * float((A.T @ A).diagonal().mean())
    stacked = torch.cat([A, lam**0.5 * torch.eye(9, dtype=torch.float64)])
    m = torch.linalg.lstsq(stacked, torch.cat([T, torch.zeros(9, dtype=torch.float64)])[:, None]).solution
    torch.testing.assert_close(M.T.reshape(-1), m[:, 0])
    q, k = samples
    measured = sum(
        float((q[b][:, pruned] @ k[b][:, pruned].T - q[b][:, kept] @ M @ k[b][:, kept].T).square().sum())
        for b in range(len(q))
    )
    found = logit.distortion(system, M)
    assert pytest.approx(measured, rel=1e-9) == found.J
    best = torch.linalg.lstsq(A, T[:, None]).solution[:, 0]
    J_star = float((T - A @ best).square().sum())
    assert found.J_star == pytest.approx(J_star, rel=1e-6)
    assert found.rho2 == pytest.approx(1 - J_star / float(T @ T), rel=1e-6)
    assert found.J_star <= found.J <= found.J_uncomp


def test_folded_sums_give_the_same_system_as_single_samples(samples: tuple[Tensor, Tensor]) -> None:
    q, k = samples
    eager, lazy = Grams(1, 5), Grams(1, 5)
    for grams in (eager, lazy):
        grams.update(q[:3], k[:3])
        grams.update(q[3:], k[3:])
    eager.fold()
    assert eager.kron is not None
    assert lazy.kron is None
    for name in ("energy", "cross"):
        torch.testing.assert_close(getattr(eager.head(0), name)(), getattr(lazy.head(0), name)())
    both = (grams.head(0).normal_of(kept) for grams in (eager, lazy))
    torch.testing.assert_close(*(dense(G, 3, 3) for G in both))


def test_energy_ranks_by_the_expected_product_of_column_norms(samples: tuple[Tensor, Tensor]) -> None:
    q, k = samples
    grams = Grams(1, 5)
    grams.update(q, k)
    expected = [sum(float(q[b, :, j].norm() ** 2 * k[b, :, j].norm() ** 2) for b in range(6)) for j in range(5)]
    torch.testing.assert_close(grams.head(0).energy().diagonal(), torch.tensor(expected, dtype=torch.float64))


def test_factors_multiply_to_identity_plus_M() -> None:
    M = torch.randn(4, 4, dtype=torch.float64)
    A, B = logit.fold_factors(M)
    torch.testing.assert_close(A @ B.T, torch.eye(4, dtype=torch.float64) + M)


def test_folded_projections_give_the_compensated_logits_biases_included() -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    W_q, W_k, b_q, b_k = (torch.randn(s, dtype=torch.float64) for s in ((5, 6), (5, 6), (5,), (5,)))
    M = 0.2 * torch.randn(3, 3, dtype=torch.float64)
    A, B = logit.fold_factors(M)
    to_q, to_k = logit.head_map(kept, len(W_q), A), logit.head_map(kept, len(W_k), B)
    (Wq, bq), (Wk, bk) = (to_q @ W_q, to_q @ b_q), (to_k @ W_k, to_k @ b_k)
    assert bq is not None
    assert bk is not None
    q, k = (x @ W_q.T + b_q)[:, kept], (x @ W_k.T + b_k)[:, kept]
    torch.testing.assert_close((x @ Wq.T + bq) @ (x @ Wk.T + bk).T, q @ k.T + q @ M @ k.T)


def test_packing_keeps_symmetric_matrices() -> None:
    A = torch.randn(2, 4, 4, dtype=torch.float64)
    A = A + A.mT
    torch.testing.assert_close(unpack(pack(A), 4), A)
    assert packed_index(4)[1, 3] == packed_index(4)[3, 1]
