"""The sums of one head, as fits ask for them: from the Grams of every entry, or from their folded products."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from corp.numerics.linalg import map_packed, pack, packed_index, unpack


class HeadGrams(Protocol):
    """One head's sums, however they are held."""

    def energy(self) -> Tensor:
        """E (d, d) = sum_b g_q * g_k; its diagonal ranks the dimensions."""

    def cross(self) -> Tensor:
        """H (d, d) = sum_b g_q g_k."""

    def kron_of(self, kept: Tensor) -> Tensor:
        """sum_b vech(g_k,SS) vech(g_q,SS)^T (t', t') for the kept dimensions."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """sum_b tr(g_k) g_q and sum_b tr(g_q) g_k, each (d, d): the two factors of sum_b g_k (x) g_q, roughly."""

    def mapped(self, A: Tensor | None, B: Tensor | None) -> Tensor:
        """sum_b vech(B g_k B^T) vech(A g_q A^T)^T; without a map that side stays as it is."""

    def mapped_energy(self, A: Tensor, B: Tensor) -> Tensor:
        """sum_b (A g_q A^T) * (B g_k B^T) (r, r)."""


class SampledHead(NamedTuple):
    """One head, from the packed Grams of every entry."""

    width: int
    q: Tensor  # (N, t), N entries
    k: Tensor  # (N, t)

    def energy(self) -> Tensor:
        return unpack((self.q * self.k).sum(0), self.width)

    def cross(self) -> Tensor:
        q, k = unpack(self.q, self.width), unpack(self.k, self.width)  # (N, d, d)
        return q.transpose(0, 1).reshape(self.width, -1) @ k.reshape(-1, self.width)

    def kron_of(self, kept: Tensor) -> Tensor:
        positions = _packed_positions(self.width, kept)
        return self.k[:, positions].mT @ self.q[:, positions]

    def factors(self) -> tuple[Tensor, Tensor]:
        diagonal = packed_index(self.width).diagonal()
        q, k = self.k[:, diagonal].sum(1) @ self.q, self.q[:, diagonal].sum(1) @ self.k
        return unpack(q, self.width), unpack(k, self.width)

    def mapped(self, A: Tensor | None, B: Tensor | None) -> Tensor:
        q = self.q if A is None else map_packed(self.q, self.width, A)
        k = self.k if B is None else map_packed(self.k, self.width, B)
        return k.mT @ q

    def mapped_energy(self, A: Tensor, B: Tensor) -> Tensor:
        q, k = map_packed(self.q, self.width, A), map_packed(self.k, self.width, B)
        return unpack((q * k).sum(0), len(A))


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

    def factors(self) -> tuple[Tensor, Tensor]:
        diagonal = packed_index(self.width).diagonal()
        q, k = self.kron[diagonal].sum(0), self.kron[:, diagonal].sum(1)
        return unpack(q, self.width), unpack(k, self.width)

    def mapped(self, A: Tensor | None, B: Tensor | None) -> Tensor:
        by_queries = self.kron if A is None else map_packed(self.kron, self.width, A)
        return by_queries if B is None else map_packed(by_queries.mT, self.width, B).mT

    def mapped_energy(self, A: Tensor, B: Tensor) -> Tensor:
        return unpack(self.mapped(A, B).diagonal(), len(A))


def _packed_positions(width: int, kept: Tensor) -> Tensor:
    """Where the packed entries of the kept submatrix stand in the full packing (t',)."""
    return pack(packed_index(width)[kept[:, None], kept])
