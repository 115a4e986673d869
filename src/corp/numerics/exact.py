"""Elimination of MLP channels by exact cost: one by one, with the compensation refitted at every step.

With y = W x to be predicted from the kept x_S, the best map is What = W Sigma_:S Sigma_SS^-1. Removing one more channel
j raises the squared error, after refitting, by exactly

    ||What_:,j||^2 / [Sigma_SS^-1]_jj,

and What, Sigma_SS^-1 follow by a rank-one downdate. Only K = Sigma_SS^-1 and N = What^T What are needed: with
v = K_:,j / sqrt(K_jj) and s = N_:,j / sqrt(K_jj) - N_jj v / (2 K_jj),

    K <- K - v v^T        N <- N - v s^T - s v^T.

Removals are done in blocks. The cheapest channels are the block's candidates, and its removals are chosen as if there
were no others: that touches small matrices only. With J the chosen channels, L the Cholesky factor of K_JJ in the order
of removal and P the triangle of the s_J, all factors v, s of the block follow at matrix speed,

    V = L^-1 K_J:        S = L^-1 (N_J: - P V),

and with them the costs of all other channels at every step. If one of those was cheaper than the choice, the block
ends before it, so that the path is exact. K and N are symmetric, so only their upper triangles are updated, in panels
of rows; and the remaining channels move to the front, so that products get smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics.linalg import VANISHING, cholesky, dead, mean_diagonal

BLOCK, SHARE = 128, 12  # removals per block, and the most as a share of all channels: wide products, small candidates
CANDIDATES = 3  # per removal of a block: with 2, some blocks of DeiT-Tiny end early; with 4, none do, but all cost more
MANY, MODERATE = 1024, 1e-5  # channels from which on, and relative ridges for which, float32 is precise enough
PANEL = 256  # rows per panel of the upper triangle: at 256 to 512 the time is about the same


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
    alive = cov[left[:, None], left] if len(without) else cov
    KN, unit, used = _start(W[:, left], alive, ridge, mean_diagonal(cov))
    order, costs, most = [without], [cov.new_zeros(len(without))], min(BLOCK, max(len(left) // SHARE, 32))
    while (n := len(left)) > least:
        gone, paid = _block(KN[:, :n, :n], min(most, n - least))
        order.append(left[gone])
        costs.append(paid.to(cov) * unit)
        left = _closed_up(left, gone)
    k_diagonal, n_diagonal = KN.diagonal(dim1=1, dim2=2)[:, : len(left)]
    order.append(left[(n_diagonal / k_diagonal).argsort(stable=True)])
    error = torch.cat([*costs, cov.new_zeros(len(left))]).cumsum(0)
    error[len(cov) - least :] = torch.inf
    return Path(torch.cat(order), error, used)


def _start(W: Tensor, cov: Tensor, ridge: float, scale: float) -> tuple[Tensor, float, float]:
    """K and N (2, D, D), where one operation serves both, the unit of N_jj / K_jj, and the relative ridge.

    Many channels are eliminated in float32, in units in which nothing overflows. With a ridge that keeps K moderate,
    the order of removal is that of float64 and the errors differ by 1e-6 (tests/real).
    """
    n = len(cov)
    K = torch.empty_like(cov)
    used, unit, dtype = _invert(cov, ridge, scale, into=K), 1.0, cov.dtype
    if n >= MANY and used >= MODERATE:
        size = float(W.square().mean().sqrt()) or 1.0
        W, unit, dtype = (W / size).float(), size**2 * scale, torch.float32
        K *= scale
    KN = K.new_empty(2, n, n, dtype=dtype)
    KN[0] = K
    for rows, columns in _panels(n):
        torch.mm(W[:, rows].mT, W[:, columns], out=KN[1, rows, columns])
    return KN, unit, used


def _block(KN: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Remove up to `steps` channels; returns their places and costs. K and N (2, n, n) become those of the others."""
    n = KN.shape[-1]
    diagonals = KN.diagonal(dim1=1, dim2=2) * KN.new_tensor([[1.0], [0.5]])  # K_jj and N_jj / 2
    ranked = (diagonals[1] / diagonals[0]).argsort(stable=True)
    candidates = ranked[: CANDIDATES * steps].sort().values
    chosen, ratios, (L, P) = _sequence(_square(KN, candidates), steps)
    places = candidates[chosen]
    factors = _rows(KN, places)  # (2, steps, n): rows of K and N, then v and s
    V, S = factors
    V.copy_(torch.linalg.solve_triangular(L, V, upper=False))
    S.copy_(torch.linalg.solve_triangular(L, S.addmm_(P, V, alpha=-1), upper=False))
    if len(candidates) < n:
        done = _undisputed(diagonals, factors, candidates, ratios)  # leading factors do not depend on later ones
        places, ratios, factors = places[:done], ratios[:done], factors[:, :done]
    source, target = _moves(n, places)
    factors[:, :, target] = factors[:, :, source]
    _move_up(KN, source, target)
    _downdate(KN, factors[:, :, : n - len(places)])
    return places, 2 * ratios


@np.errstate(over="ignore", invalid="ignore")  # of a K_jj that was rounded to nothing
def _sequence(KN: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The removals if there were only these channels: their places, halves of their costs, and (L, P).

    This runs in NumPy, on the CPU: torch takes longer to start an operation on so few numbers than to compute it.
    """
    c = KN.shape[-1]
    rows = KN.cpu().permute(1, 0, 2).reshape(c, 2 * c).numpy()  # row j: K_j: and N_j:
    factors = np.empty((steps, 2 * c), rows.dtype)  # v and s of every removal
    V, S = factors[:, :c], factors[:, c:]
    diagonals = np.stack([rows.diagonal(), rows.diagonal(c) / 2])  # K_jj and N_jj / 2: both lose v times [v, s]
    k_diagonal, half = diagonals
    tiny, gone, ratios = np.finfo(rows.dtype).tiny, [], []
    for t in range(steps):
        j = int((half / k_diagonal).argmin())
        k_jj, ratio = k_diagonal[j], half[j] / k_diagonal[j]
        now, v, s = factors[t], V[t], S[t]
        np.subtract(rows[j], V[:t, j] @ factors[:t], out=now)
        s -= S[:t, j] @ V[:t]
        now *= k_jj**-0.5
        s -= ratio * v
        diagonals -= now.reshape(2, c) * v
        np.maximum(diagonals, tiny, out=diagonals)
        half[j] = np.inf  # never chosen again
        gone.append(j)
        ratios.append(ratio)
    triangles = np.tril(factors.reshape(steps, 2, c)[:, :, gone].transpose(1, 2, 0))
    places, halves, LP = (torch.from_numpy(np.asarray(x)).to(KN.device) for x in (gone, ratios, triangles))
    return places, halves, LP


def _undisputed(diagonals: Tensor, factors: Tensor, candidates: Tensor, ratios: Tensor) -> int:
    """The number of removals before another channel than the candidates would have been cheaper; at least one."""
    V = factors[0]
    earlier = V.new_ones(len(V), len(V)).tril(-1)
    k_diagonal, half = (diagonals[:, None] - earlier @ (factors * V)).clamp_(min=torch.finfo(V.dtype).tiny)
    half[:, candidates] = torch.inf
    disputed = (half / k_diagonal).amin(1) < ratios
    return max(1, int((disputed.cumsum(0) == 0).sum()))


def _panels(n: int) -> list[tuple[slice, slice]]:
    """The rows of every panel of a matrix (n, n), and the columns from its diagonal on."""
    return [(slice(i, min(i + PANEL, n)), slice(i, n)) for i in range(0, n, PANEL)]


def _square(A: Tensor, places: Tensor) -> Tensor:
    """The rows and columns at ascending places of symmetric matrices (2, n, n), of which the panels are up to date."""
    upper = A[:, places[:, None], places].triu()
    return upper + upper.triu(1).mT


def _rows(A: Tensor, places: Tensor) -> Tensor:
    """The rows (2, r, n) at these places of symmetric matrices (2, n, n), of which the panels are up to date."""
    rows = A[:, places]
    for row, j in zip(rows.unbind(1), places.tolist(), strict=True):
        if start := j // PANEL * PANEL:
            row[:, :start] = A[:, :start, j]
    return rows


def _downdate(KN: Tensor, factors: Tensor) -> None:
    """K - V^T V and N - V^T S - S^T V of the m channels left, in place; factors (2, steps, m) are V and S."""
    V, m = factors[0], factors.shape[-1]
    both, swapped = factors.reshape(-1, m), factors.flip(0).view(-1, m)
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


def _move_up(A: Tensor, source: Tensor, target: Tensor) -> None:
    """Move channels, in place: rows and columns of symmetric matrices (2, n, n) with only their panels up to date."""
    rows = _rows(A, source)
    rows[:, :, target] = rows[:, :, source]
    A[:, target] = rows
    for row, j in zip(rows.unbind(1), target.tolist(), strict=True):
        end = (j // PANEL + 1) * PANEL
        A[:, :end, j] = row[:, :end]


def _invert(cov: Tensor, ridge: float, scale: float, *, into: Tensor) -> float:
    """Write the panels of (cov + lambda I)^-1; returns lambda / scale, the smallest from `ridge` on at which it exists.

    It exists up to rounding: the pivots of Cholesky's factor are conditional variances, and below `least` their
    inverses dominate all others.
    """
    least = scale * torch.finfo(cov.dtype).eps ** 0.7
    for relative in (ridge, *(v for v in VANISHING if v > ridge)):
        into.copy_(cov).diagonal().add_(relative * scale)
        if (L := cholesky(into)) is not None and not bool((L.diagonal().square() < least).any()):
            _invert_triangle(L)
            panels = [rows for rows, _ in _panels(len(L))]
            for i, columns in enumerate(panels):
                below = L[columns.start :]  # L^-1 is 0 above
                for rows in panels[: i + 1]:
                    torch.mm(below[:, rows].mT, below[:, columns], out=into[rows, columns])
            return relative
    raise SingularSystemError(f"the covariance of {len(cov)} channels is not positive definite; check the data")


def _invert_triangle(L: Tensor) -> None:
    """L <- L^-1 in place, for L (n, n) lower triangular: by halves, so that most of the work is in matrix products."""
    if (n := len(L)) <= PANEL:
        L.copy_(torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False))
        return
    one, two = slice(0, n // 2), slice(n // 2, n)
    _invert_triangle(L[one, one])
    L[two, one] = torch.linalg.solve_triangular(L[two, two], L[two, one] @ L[one, one], upper=False).neg_()
    _invert_triangle(L[two, two])
