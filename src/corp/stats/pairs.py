"""Second moments of a rotary attention's pair products, of all query heads: small sums that add, whatever the data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from corp.errors import StatisticsError
from corp.numerics.rotary import pair_moments
from corp.stats.moments import sum_device

# Blocks of queries per sample under a causal mask: of the logits that b blocks count, 1/(b+1) do not exist. An entry is
# folded at once and costs no memory, so there can be many.
PAIR_BLOCKS = 32


class PairSums:
    """A (H, d, d) of numerics.rotary, as it is and with every entry's keys centred, for `width` rotated dimensions.

    Softmax does not see what is constant along a row of logits. Centring the keys that a query sees takes that out, so
    the centred sums measure what attention can notice; the others measure logits, as the paper does.
    """

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.samples = 0
        self.tokens = 0  # queries
        self.raw = torch.zeros(heads, width, width, dtype=torch.float64)
        self.centred = torch.zeros(heads, width, width, dtype=torch.float64)

    def update(
        self,
        q: Tensor,
        k: Tensor,
        *,
        q_mask: Tensor | None = None,
        k_mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        """Add samples with rotated queries q (B, H, n, d) and keys k (B, K, m, d); masks are True at real tokens."""
        q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
        self.samples += len(q)
        self.tokens += q.shape[0] * q.shape[2] if q_mask is None else int(q_mask.sum())
        q, k = _zeroed(q, q_mask), _zeroed(k, k_mask)
        real = torch.ones(len(k), k.shape[2], device=k.device) if k_mask is None else k_mask.float()
        for g_q, g_k, key_sum, keys in _entries(q, k, real, PAIR_BLOCKS if causal else 1, window):
            mean = key_sum / keys.clamp(min=1)[:, None, None]  # (B, K, d)
            centred = g_k - keys[:, None, None, None] * mean[..., :, None] * mean[..., None, :]
            self.raw += self._moments(g_q, g_k)
            self.centred += self._moments(g_q, centred)

    def _moments(self, g_q: Tensor, g_k: Tensor) -> Tensor:
        repeated = g_k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        summed = pair_moments(g_q, repeated).sum(0)
        return summed.to(sum_device(summed)).double().to(self.raw.device)

    def group(self, g: int, *, centred: bool) -> Tensor:
        """(R, d, d): the query heads that share key head g."""
        if self.samples == 0:
            raise StatisticsError("no samples were seen at this site")
        size = self.heads // self.kv_heads
        return (self.centred if centred else self.raw)[g * size : (g + 1) * size]

    def to(self, device: torch.device) -> None:
        self.raw, self.centred = self.raw.to(device), self.centred.to(device)

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
        both.raw, both.centred = self.raw + other.raw, self.centred + other.centred
        return both

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.samples, self.tokens])
        return {"counts": counts, "raw": self.raw, "centred": self.centred}

    @classmethod
    def from_state(cls, heads: int, kv_heads: int, width: int, state: dict[str, Tensor]) -> PairSums:
        sums = cls(heads, kv_heads, width)
        sums.samples, sums.tokens = (int(count) for count in state["counts"])
        sums.raw, sums.centred = state["raw"].double(), state["centred"].double()
        return sums

    @staticmethod
    def shapes(heads: int, width: int) -> dict[str, tuple[int, ...]]:
        return {"counts": (2,), "raw": (heads, width, width), "centred": (heads, width, width)}


def _zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Heads (B, H, n, d) without padding, which may hold anything, NaN included."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def _entries(
    q: Tensor, k: Tensor, real: Tensor, blocks: int, window: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Grams (B, H, d, d) of a block of queries and of the keys it sees; the sum (B, K, d) and number (B,) of these."""
    if blocks == 1:
        yield q.mT @ q, k.mT @ k, k.sum(2), real.sum(1)
        return
    blocks = min(blocks, q.shape[2])
    g_k, key_sum, keys = (torch.zeros((), device=k.device, dtype=k.dtype) for _ in range(3))
    parts = (x.tensor_split(blocks, dim=2) for x in (q, k))
    start = 0
    for q_block, k_block, here in zip(*parts, real.tensor_split(blocks, dim=1), strict=True):
        end = start + q_block.shape[2]
        if window is None:
            g_k, key_sum, keys = g_k + k_block.mT @ k_block, key_sum + k_block.sum(2), keys + here.sum(1)
        else:
            seen = slice(max(0, start - window + 1), end)
            near = k[:, :, seen]
            g_k, key_sum, keys = near.mT @ near, near.sum(2), real[:, seen].sum(1)
        yield q_block.mT @ q_block, g_k, key_sum, keys
        start = end
