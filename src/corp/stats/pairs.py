"""Second moments of a rotary attention's pair products, of all query heads: small sums that add, whatever the data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from corp.errors import StatisticsError
from corp.numerics.rotary import pair_moments
from corp.stats.blocks import query_blocks, same_lengths
from corp.stats.moments import sum_device

# Blocks of queries per sample under a causal mask: of the logits that b blocks count, 1/(b+1) do not exist. An entry is
# folded at once and costs no memory, so there can be many.
PAIR_BLOCKS = 32
# Queries of a sample whose attention is looked at, spread evenly: each costs a product of all keys with themselves.
LOOKED_AT = 64


class PairSums:
    """A (H, d, d) of numerics.rotary for `width` rotated dimensions, over all logits, and weighted by attention.

    An error delta_mn of query m's logits changes its attention p_m. by a divergence KL of half the variance of
    delta_m. under p_m., up to third order: what is constant along the row goes unnoticed, and so does what befalls keys
    that get no attention. `weighted` sums that variance: its entries are single queries, with g_q = q_m q_m^T and for
    g_k the covariance of the keys under p_m.
    """

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.samples = 0
        self.tokens = 0  # queries
        self.raw = torch.zeros(heads, width, width, dtype=torch.float64)
        self.weighted = torch.zeros(heads, width, width, dtype=torch.float64)

    def update(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        """Add samples with queries q (B, H, n, d) and keys k (B, K, n, d), their first `width` dimensions rotated.

        `scale` is the softmax's; the mask (B, n) is True at real tokens.
        """
        q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
        self.samples += len(q)
        for q_part, k_part in same_lengths(q, k, mask):
            self.tokens += q_part.shape[0] * q_part.shape[2]
            turned = q_part[..., : self.width], k_part[..., : self.width]
            for block in query_blocks(*turned, *((PAIR_BLOCKS, window) if causal else (1, None))):
                g_q = block.queries.mT @ block.queries
                self.raw += self._moments(g_q, self._repeated(block.key_gram))
            for g_q, g_k in self._attention(q_part, k_part, scale, causal, window):
                self.weighted += self._moments(g_q, g_k)

    def _attention(
        self, q: Tensor, k: Tensor, scale: float, causal: bool, window: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """q_m q_m^T and the covariance of the keys under query m's attention, each (B, H, d, d)."""
        n, every = q.shape[2], self._repeated(k)
        keys = every[..., : self.width]
        for m in ((torch.arange(min(LOOKED_AT, n)) + 0.5) * n / min(LOOKED_AT, n)).long().tolist():
            first = 0 if window is None else max(0, m - window + 1)
            seen = slice(first, m + 1) if causal else slice(None)
            p = (scale * (every[:, :, seen] @ q[:, :, m, :, None])).softmax(2)  # (B, H, keys, 1)
            near = keys[:, :, seen]
            mean = (p * near).sum(2)
            query = q[:, :, m, : self.width]
            yield _outer(query), (p * near).mT @ near - _outer(mean)

    def _repeated(self, x: Tensor) -> Tensor:
        """Keys, or their Grams, once for every query head that shares them."""
        return x if self.heads == self.kv_heads else x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def _moments(self, g_q: Tensor, g_k: Tensor) -> Tensor:
        summed = pair_moments(g_q, g_k).sum(0)
        return summed.to(sum_device(summed)).double().to(self.raw.device)

    def group(self, g: int, *, weighted: bool) -> Tensor:
        """(R, d, d): the query heads that share key head g."""
        if self.samples == 0:
            raise StatisticsError("no samples were seen at this site")
        size = self.heads // self.kv_heads
        return (self.weighted if weighted else self.raw)[g * size : (g + 1) * size]

    def to(self, device: torch.device) -> None:
        self.raw, self.weighted = self.raw.to(device), self.weighted.to(device)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.raw).all())

    def __add__(self, other: PairSums) -> PairSums:
        if (self.heads, self.kv_heads, self.width) != (other.heads, other.kv_heads, other.width):
            raise StatisticsError(
                f"pair sums of {self.heads} heads x {self.width} and of {other.heads} x {other.width} do not add"
            )
        both = PairSums(self.heads, self.kv_heads, self.width)
        both.samples, both.tokens = self.samples + other.samples, self.tokens + other.tokens
        both.raw, both.weighted = self.raw + other.raw, self.weighted + other.weighted
        return both

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.samples, self.tokens])
        return {"counts": counts, "raw": self.raw, "weighted": self.weighted}

    @classmethod
    def from_state(cls, heads: int, kv_heads: int, width: int, state: dict[str, Tensor]) -> PairSums:
        sums = cls(heads, kv_heads, width)
        sums.samples, sums.tokens = (int(count) for count in state["counts"])
        sums.raw, sums.weighted = state["raw"].double(), state["weighted"].double()
        return sums

    @staticmethod
    def shapes(heads: int, width: int) -> dict[str, tuple[int, ...]]:
        return {"counts": (2,), "raw": (heads, width, width), "weighted": (heads, width, width)}


def _outer(x: Tensor) -> Tensor:
    return x[..., :, None] * x[..., None, :]
