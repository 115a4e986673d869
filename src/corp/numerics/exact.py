"""Which MLP channels to remove, by exact cost: backward elimination with the compensation refitted at every step.

With y = W x to be predicted from the kept x_S, the best map is What = W Sigma_:S Sigma_SS^-1. Removing one more channel
j raises the squared error, after refitting, by exactly

    ||What_:,j||^2 / [Sigma_SS^-1]_jj,

and What, Sigma_SS^-1 follow by a rank-one downdate. Only K = Sigma_SS^-1 and N = What^T What are needed: with
u = K_:,j / K_jj and p = N_:,j,

    K <- K - K_jj u u^T        N <- N - u r^T - r u^T,    r = p - N_jj u / 2.

The downdates of a block of removals are kept as factors and applied together, as matrix products; in between only the
diagonals, and the one column that a removal needs, are brought up to date.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.linalg import VANISHING, mean_diagonal

BLOCK = 128  # removals per block: the factors stay in cache, the products are still wide


class Path(NamedTuple):
    """Channels in the order in which they go, and the squared error once each of them is gone."""

    order: Tensor  # (D,)
    error: Tensor  # (D,)

    def keep(self, width: int) -> tuple[Tensor, Tensor]:
        """(kept, pruned) at this width, both ascending."""
        gone = len(self.order) - width
        return self.order[gone:].sort().values, self.order[:gone].sort().values

    def by_width(self) -> Tensor:
        """(D + 1,): the error when 0, 1 … D channels are left; inf where the path does not go."""
        return torch.cat([self.error.flip(0), self.error.new_zeros(1)])


def elimination_path(W: Tensor, cov: Tensor, *, ridge: float = 0.0, least: int = 1) -> Path:
    """Remove channels one by one down to `least`, cheapest first; W (o, D), cov (D, D), float64.

    The ridge is relative, as in the fit. What is never removed comes last, in order of its cost when it ended.
    """
    K, N = _inverse(cov, ridge), W.mT @ W
    left = torch.arange(len(K), device=K.device)  # rows of K and N -> channels
    order, costs = [], []
    while len(left) > least:
        gone, paid, K, N = _block(K, N, min(BLOCK, len(left) - least))
        order.append(left[gone])
        costs += paid
        alive = torch.ones(len(left), dtype=torch.bool, device=K.device)
        alive[gone] = False
        left = left[alive]
    order.append(left[(N.diagonal() / K.diagonal()).argsort(stable=True)])
    never = torch.full((len(left),), torch.inf, dtype=torch.float64)
    return Path(torch.cat(order), torch.cat([torch.tensor(costs, dtype=torch.float64).cumsum(0), never]))


def _block(K: Tensor, N: Tensor, steps: int) -> tuple[Tensor, list[float], Tensor, Tensor]:
    """Remove `steps` channels: their indices, what each cost, and K and N of the others."""
    D = len(K)
    U, R = K.new_zeros(2, D, steps)
    weight = K.new_zeros(steps)  # K_jj of every removal
    k_diagonal, n_diagonal = K.diagonal().clone(), N.diagonal().clone()
    alive = torch.ones(D, dtype=torch.bool, device=K.device)
    gone, costs = [], []
    for t in range(steps):
        cost = torch.where(alive, n_diagonal / k_diagonal, torch.inf)
        j = int(cost.argmin())
        u = (K[j] - U[:, :t] @ (weight[:t] * U[j, :t])) / k_diagonal[j]  # rows: K and N are symmetric
        p = N[j] - U[:, :t] @ R[j, :t] - R[:, :t] @ U[j, :t]
        r = p - 0.5 * n_diagonal[j] * u
        U[:, t], R[:, t], weight[t] = u, r, k_diagonal[j]
        gone.append(j)
        costs.append(max(0.0, float(cost[j])))
        alive[j] = False
        k_diagonal = (k_diagonal - weight[t] * u.square()).clamp_(min=torch.finfo(K.dtype).tiny)
        n_diagonal = (n_diagonal - 2 * u * r).clamp_(min=0.0)
    left = alive.nonzero().squeeze(1)
    U, R = U[left], R[left]
    K = K[left[:, None], left].addmm_(U * weight, U.mT, alpha=-1)
    N = N[left[:, None], left].addmm_(torch.cat([U, R], 1), torch.cat([R, U], 1).mT, alpha=-1)
    return torch.tensor(gone, device=K.device), costs, K, N


def _inverse(cov: Tensor, ridge: float) -> Tensor:
    """(cov + lambda I)^-1, the smallest lambda from `ridge` on at which that exists."""
    scale, identity = mean_diagonal(cov), torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    for relative in dict.fromkeys((ridge, *(v for v in VANISHING if v > ridge))):
        L, info = torch.linalg.cholesky_ex(cov + relative * scale * identity)
        if info.item() == 0 and bool(torch.isfinite(L).all()):
            return torch.cholesky_inverse(L)
    raise SingularSystemError(f"the covariance of {len(cov)} channels is not positive definite; check the data")
