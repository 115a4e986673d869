"""Elimination of MLP channels by exact cost: one by one, with the compensation refitted at every step.

With y = W x to be predicted from the kept x_S, the best map is What = W Sigma_:S Sigma_SS^-1. Removing one more channel
j raises the squared error, after refitting, by exactly

    ||What_:,j||^2 / [Sigma_SS^-1]_jj,

and What, Sigma_SS^-1 follow by a rank-one downdate. Only K = Sigma_SS^-1 and N = What^T What are needed: with
v = K_:,j / sqrt(K_jj) and s = N_:,j / sqrt(K_jj) - N_jj v / (2 K_jj),

    K <- K - v v^T        N <- N - v s^T - s v^T.

The downdates of a block of removals are kept as factors and applied together, as matrix products; in between only the
diagonals, and the one row that a removal needs, are updated. K and N are symmetric, so only their upper triangles are
updated, in panels of rows; and the remaining channels move to the front, so that products get smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.linalg import VANISHING, cholesky, dead, mean_diagonal

BLOCK = 128  # removals per block: the factors stay in cache, the products are still wide
PANEL = 512  # rows per panel of the upper triangle: narrower products cost more time than they save


class Path(NamedTuple):
    """Channels in the order of their removal, and the squared error after each removal."""

    order: Tensor  # (D,)
    error: Tensor  # (D,)
    ridge: float  # relative; larger than requested if the covariance is singular at that

    def keep(self, width: int) -> tuple[Tensor, Tensor]:
        """(kept, pruned) at this width, both ascending."""
        gone = len(self.order) - width
        return self.order[gone:].sort().values, self.order[:gone].sort().values

    def by_width(self) -> Tensor:
        """The error (D + 1,) with 0, 1 … D channels left; inf where the path has ended."""
        return torch.cat([self.error.flip(0), self.error.new_zeros(1)])


def elimination_path(W: Tensor, cov: Tensor, *, ridge: float = 0.0, least: int = 1) -> Path:
    """Remove channels one by one down to `least`, cheapest first; W (o, D), cov (D, D), in float64 if they are.

    The ridge is relative, as in the fit. Channels without variance are removed first and cost nothing. Channels that
    are never removed come last, in order of their cost at the end of the path.
    """
    without, left = dead(cov).nonzero()[:, 0], (~dead(cov)).nonzero()[:, 0]
    inverse, used = _inverse(cov[left[:, None], left], ridge, mean_diagonal(cov))
    KN = torch.stack([inverse, torch.empty_like(inverse)])  # (2, D, D): one operation serves both
    del inverse
    for rows, columns in _panels(len(left)):
        torch.mm(W[:, left[rows]].mT, W[:, left[columns]], out=KN[1, rows, columns])
    order, costs = [without], [cov.new_zeros(len(without))]
    while (n := len(left)) > least:
        gone, paid = _block(KN[:, :n, :n], min(BLOCK, n - least))
        order.append(left[gone])
        costs.append(paid)
        left = _closed_up(left, gone)
    k_diagonal, n_diagonal = KN.diagonal(dim1=1, dim2=2)[:, : len(left)]
    order.append(left[(n_diagonal / k_diagonal).argsort(stable=True)])
    error = torch.cat([*costs, cov.new_zeros(len(left))]).cumsum(0)
    error[len(cov) - least :] = torch.inf
    return Path(torch.cat(order), error, used)


def _block(KN: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Remove `steps` channels; returns their places and costs. K and N (2, n, n) become those of the others."""
    factors = KN.new_empty(steps, 2, KN.shape[-1])  # v and s of every removal
    V, S = factors.unbind(1)
    diagonals = KN.diagonal(dim1=1, dim2=2) * KN.new_tensor(
        [[1.0], [0.5]]
    )  # K_jj and N_jj / 2: both lose v times [v, s]
    k_diagonal, half = diagonals
    gone, costs = [], []
    for t in range(steps):
        j = int((half / k_diagonal).argmin())
        k_jj, half_jj = diagonals[:, j].tolist()
        now = factors[t]
        _read_row(KN, j, into=now)
        v, s = now
        if t:
            before, v_j, s_j = V[:t].mT, V[:t, j], S[:t, j]
            v.addmv_(before, v_j, alpha=-1)
            s.addmv_(before, s_j, alpha=-1).addmv_(S[:t].mT, v_j, alpha=-1)
        now.mul_(k_jj**-0.5)
        s.sub_(v, alpha=half_jj / k_jj)
        diagonals.addcmul_(now, v, value=-1).clamp_(min=torch.finfo(KN.dtype).tiny)
        half[j] = torch.inf  # never chosen again
        gone.append(j)
        costs.append(2 * half_jj / k_jj)
    places = torch.tensor(gone, device=KN.device)
    _move_up(KN, places)
    _downdate(KN, _closed_up(factors.permute(2, 0, 1), places).permute(1, 2, 0))
    return places, KN.new_tensor(costs)


def _panels(n: int) -> list[tuple[slice, slice]]:
    """The rows of every panel of a matrix (n, n), and the columns from its diagonal on."""
    return [(slice(i, min(i + PANEL, n)), slice(i, n)) for i in range(0, n, PANEL)]


def _read_row(A: Tensor, j: int, *, into: Tensor) -> None:
    """Read row j of symmetric matrices (2, n, n), of which only the panels are up to date."""
    start = j // PANEL * PANEL
    into[:, start:] = A[:, j, start:]
    if start:
        into[:, :start] = A[:, :start, j]


def _downdate(KN: Tensor, factors: Tensor) -> None:
    """K - V^T V and N - V^T S - S^T V of the m channels left, in place; factors (steps, 2, m) are v and s."""
    V, m = factors[:, 0], factors.shape[-1]
    both, swapped = (part.reshape(-1, m) for part in (factors, factors.flip(1)))
    for rows, columns in _panels(m):
        KN[0, rows, columns].addmm_(V[:, rows].mT, V[:, columns], alpha=-1)
        KN[1, rows, columns].addmm_(both[:, rows].mT, swapped[:, columns], alpha=-1)


def _moves(n: int, gone: Tensor) -> tuple[Tensor, Tensor]:
    """(from, to): the places of remaining channels behind the new end, and the gaps that they fill."""
    stays = torch.ones(n, dtype=torch.bool, device=gone.device)
    stays[gone] = False
    m = n - len(gone)
    return stays[m:].nonzero()[:, 0] + m, (~stays[:m]).nonzero()[:, 0]


def _closed_up(x: Tensor, gone: Tensor) -> Tensor:
    """x (n, ...) without the removed places; the last entries fill the gaps."""
    source, target = _moves(len(x), gone)
    x[target] = x[source]
    return x[: len(x) - len(gone)]


def _move_up(A: Tensor, gone: Tensor) -> None:
    """Likewise, in place, for rows and columns of symmetric matrices (2, n, n) with only their panels up to date."""
    source, target = _moves(A.shape[-1], gone)
    own = torch.arange(A.shape[-1], device=A.device) >= (source // PANEL * PANEL)[:, None]
    rows = torch.where(own, A[:, source], A[:, :, source].mT)
    rows[:, :, target] = rows[:, :, source]
    A[:, target] = rows
    A[:, :, target] = rows.mT


def _inverse(cov: Tensor, ridge: float, scale: float) -> tuple[Tensor, float]:
    """(cov + lambda I)^-1 and lambda / scale, the smallest from `ridge` on at which the inverse exists, up to rounding.

    The pivots of Cholesky's factor are conditional variances: below `least` their inverses dominate all others.
    """
    least = scale * torch.finfo(cov.dtype).eps ** 0.7
    for relative in (ridge, *(v for v in VANISHING if v > ridge)):
        regular = cov.clone()
        regular.diagonal().add_(relative * scale)
        if (L := cholesky(regular)) is not None and not bool((L.diagonal().square() < least).any()):
            return torch.cholesky_inverse(L), relative
    raise SingularSystemError(f"the covariance of {len(cov)} channels is not positive definite; check the data")
