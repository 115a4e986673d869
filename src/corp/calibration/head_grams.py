"""The sums of one head, as fits use them: from the Grams of every entry, or from their folded products."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from corp.numerics.kronecker import Entries, Folded
from corp.numerics.linalg import map_packed, pack, packed_index, unpack


class SampledHead(NamedTuple):
    """One head, from the packed Grams of every entry, one column each."""

    width: int
    q: Tensor  # (t, N), N entries
    k: Tensor  # (t, N)

    def energy(self) -> Tensor:
        """E (d, d) = sum_b g_q * g_k; its diagonal ranks the dimensions."""
        return unpack((self.q * self.k).sum(1), self.width)

    def cross(self) -> Tensor:
        """H (d, d) = sum_b g_q g_k."""
        return _at_identity(self.normal())

    def cross_of(self, kept: Tensor, pruned: Tensor) -> Tensor:
        """h (S, S) = sum_b g_q,SP g_k,PS."""
        places = packed_index(self.width, self.q.device)[kept[:, None], pruned]  # (S, P)
        return self.q[places].flatten(1) @ self.k[places].flatten(1).mT

    def normal_of(self, kept: Tensor) -> Entries:
        """M -> sum_b g_q,SS M g_k,SS, for the kept dimensions."""
        positions = _packed_positions(self.width, kept.to(self.q.device))
        return Entries(self.q[positions], self.k[positions], len(kept), len(kept))

    def single(self) -> SampledHead:
        """These sums in float32."""
        return self._replace(q=self.q.float(), k=self.k.float())

    def normal(self, A: Tensor | None = None, B: Tensor | None = None) -> Entries:
        """X -> sum_b (A g_q A^T) X (B g_k B^T); without a map that side stays as it is."""
        q, k = (p if M is None else map_packed(p, self.width, M.to(p)) for p, M in ((self.q, A), (self.k, B)))
        return Entries(q, k, *(self.width if M is None else len(M) for M in (A, B)))


class FoldedHead(NamedTuple):
    """One head, from the sum of the Kronecker products."""

    width: int
    kron: Tensor  # (t, t): keys by queries

    def energy(self) -> Tensor:
        """As SampledHead.energy."""
        return unpack(self.kron.diagonal(), self.width)

    def cross(self) -> Tensor:
        """As SampledHead.cross."""
        return _at_identity(self.normal())

    def cross_of(self, kept: Tensor, pruned: Tensor) -> Tensor:
        """As SampledHead.cross_of."""
        places = packed_index(self.width, self.kron.device)[kept[:, None], pruned]  # (S, P)
        return self.kron[places[None], places[:, None]].sum(-1)

    def normal_of(self, kept: Tensor) -> Folded:
        """As SampledHead.normal_of."""
        positions = _packed_positions(self.width, kept.to(self.kron.device))
        return Folded(self.kron[positions[:, None], positions], len(kept), len(kept))

    def single(self) -> FoldedHead:
        """As SampledHead.single."""
        return self._replace(kron=self.kron.float())

    def normal(self, A: Tensor | None = None, B: Tensor | None = None) -> Folded:
        """As SampledHead.normal."""
        kron = self.kron if B is None else map_packed(self.kron, self.width, B.to(self.kron))
        if A is not None:
            kron = map_packed(kron.mT.contiguous(), self.width, A.to(kron)).mT.contiguous()
        return Folded(kron, *(self.width if M is None else len(M) for M in (A, B)))


HeadGrams: TypeAlias = SampledHead | FoldedHead


def _at_identity(normal: Entries | Folded) -> Tensor:
    """sum_b g_q I g_k."""
    P = normal.L if isinstance(normal, Entries) else normal.P
    return normal.apply(torch.eye(normal.m, dtype=P.dtype, device=P.device))


def _packed_positions(width: int, kept: Tensor) -> Tensor:
    """The positions (t',) of the kept submatrix's packed entries in the full packing."""
    return pack(packed_index(width, kept.device)[kept[:, None], kept])
