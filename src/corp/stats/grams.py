"""Per-sample Gram matrices of queries and keys, of all heads of one attention."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from corp.errors import StatisticsError
from corp.numerics.linalg import pack, packed_index, packed_size, unpack
from corp.stats.moments import sum_device


class Grams:
    """g_q = Q^T Q and g_k = K^T K of every sample and head, or the sum of their Kronecker products.

    Few samples are kept one by one (packed, float32 like the products they are); past the number at
    which that would be larger than sum_b vech(g_k) vech(g_q)^T, they are folded into that sum (float64).
    Both hold all that any choice of dimensions needs.
    """

    def __init__(self, heads: int, width: int) -> None:
        self.heads, self.width = heads, width
        self.samples = 0
        self.tokens = 0
        self._q: list[Tensor] = []  # each (b, H, t), t = d(d+1)/2
        self._k: list[Tensor] = []
        self.kron: Tensor | None = None  # (H, t, t): keys by queries

    @property
    def fold_after(self) -> int:
        """2 t float32 per sample against t^2 float64."""
        return packed_size(self.width)

    def update(self, q: Tensor, k: Tensor) -> None:
        """Add samples with queries q (B, n, H d) and keys k (B, m, H d)."""
        self._q.append(self._packed_grams(q))
        self._k.append(self._packed_grams(k))
        self.samples += len(q)
        self.tokens += q.shape[0] * q.shape[1]
        self._fold_if_many()

    def to(self, device: torch.device) -> None:
        self._q, self._k = ([part.to(device) for part in parts] for parts in (self._q, self._k))
        self.kron = None if self.kron is None else self.kron.to(device)

    def _packed_grams(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        x = x.reshape(*x.shape[:2], self.heads, self.width).transpose(1, 2)  # (B, H, n, d)
        return pack(x.mT @ x).to(sum_device(x))  # (B, H, t)

    def _fold_if_many(self) -> None:
        if self._q and (self.kron is not None or self.samples > self.fold_after):
            self.kron = self._summed()
            self._q, self._k = [], []

    def _summed(self) -> Tensor:
        """sum_b vech(g_k) vech(g_q)^T of everything seen (H, t, t)."""
        held = torch.zeros(()) if self.kron is None else self.kron
        if not self._q:
            return held
        q, k = (torch.cat(parts).double().transpose(0, 1) for parts in (self._q, self._k))  # (H, b, t)
        return held.to(q) + k.mT @ q

    @property
    def finite(self) -> bool:
        newest = [*self._q[-1:], *self._k[-1:]]
        if self.kron is not None:
            newest.append(self.kron.diagonal(dim1=1, dim2=2))
        return all(bool(torch.isfinite(part).all()) for part in newest)

    def head(self, h: int) -> HeadGrams:
        """The sums of one head, in float64."""
        if self.samples == 0:
            raise StatisticsError("no samples were seen at this site")
        if self.kron is not None:
            return FoldedHead(self.width, self.kron[h])
        q, k = (torch.cat([part[:, h] for part in parts]).double() for parts in (self._q, self._k))
        return SampledHead(self.width, q, k)

    def __add__(self, other: Grams) -> Grams:
        if (self.heads, self.width) != (other.heads, other.width):
            raise StatisticsError(
                f"Grams of {self.heads} heads x {self.width} and of {other.heads} x {other.width} do not add"
            )
        both = Grams(self.heads, self.width)
        both.samples, both.tokens = self.samples + other.samples, self.tokens + other.tokens
        both._q, both._k = self._q + other._q, self._k + other._k
        folded = [part.kron for part in (self, other) if part.kron is not None]
        both.kron = torch.stack(folded).sum(0) if folded else None
        both._fold_if_many()
        return both


class HeadGrams(Protocol):
    """One head's sums, however they are held."""

    def energy(self) -> Tensor:
        """E (d, d) = sum_b g_q * g_k; its diagonal ranks the dimensions."""

    def cross(self) -> Tensor:
        """H (d, d) = sum_b g_q g_k."""

    def kron_of(self, kept: Tensor) -> Tensor:
        """sum_b vech(g_k,SS) vech(g_q,SS)^T (t', t') for the kept dimensions."""


class SampledHead(NamedTuple):
    """One head, from the packed Grams of every sample."""

    width: int
    q: Tensor  # (N, t)
    k: Tensor  # (N, t)

    def energy(self) -> Tensor:
        return unpack((self.q * self.k).sum(0), self.width)

    def cross(self) -> Tensor:
        q, k = unpack(self.q, self.width), unpack(self.k, self.width)  # (N, d, d)
        return q.transpose(0, 1).reshape(self.width, -1) @ k.reshape(-1, self.width)

    def kron_of(self, kept: Tensor) -> Tensor:
        positions = _packed_positions(self.width, kept)
        return self.k[:, positions].mT @ self.q[:, positions]


class FoldedHead(NamedTuple):
    """One head, from the sum of the Kronecker products."""

    width: int
    kron: Tensor  # (t, t): keys by queries

    def energy(self) -> Tensor:
        return unpack(self.kron.diagonal(), self.width)

    def cross(self) -> Tensor:
        index = packed_index(self.width)
        # H[i, j] = sum_l g_q[i, l] g_k[l, j], axes (i, l, j)
        return self.kron[index[None, :, :], index[:, :, None]].sum(1)

    def kron_of(self, kept: Tensor) -> Tensor:
        positions = _packed_positions(self.width, kept)
        return self.kron[positions[:, None], positions]


def _packed_positions(width: int, kept: Tensor) -> Tensor:
    """Where the packed entries of the kept submatrix stand in the full packing (t',)."""
    return pack(packed_index(width)[kept[:, None], kept])
