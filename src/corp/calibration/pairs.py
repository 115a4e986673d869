"""Second moments of a rotary attention's pair products, for all query heads: small additive sums."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.calibration.moments import sum_device
from corp.calibration.query_blocks import query_blocks, same_lengths, with_key_grams
from corp.errors import StatisticsError
from corp.numerics.rotary import pair_moments

# Blocks of queries per sample under a causal mask: of the logits that b blocks count, 1/(b+1) are masked. An entry is
# folded at once and needs no memory, so there can be many.
PAIR_BLOCKS = 32
# The most evenly spaced queries of a sample whose attention is computed: each costs a product of all keys with
# themselves. Calibration takes fewer of each sample where there are many samples (Settings.queries_of).
SAMPLED_QUERIES = 64


class PairSums:
    """A (H, d, d) of numerics.rotary for `width` rotated dimensions, over all logits, and weighted by attention.

    An error delta_mn of query m's logits changes its attention p_m. by a KL divergence of half the variance of
    delta_m. under p_m., up to third order: errors that are constant along the row have no effect, nor have errors of
    keys that get no attention. `weighted` sums that variance: its entries are single queries, with g_q = q_m q_m^T and
    the covariance of the keys under p_m as g_k.

    If heads are `normed`, `lengths` (H + K, d + 1, d + 1) are F of numerics.lengths, of query heads and then of key
    heads. Half of a key's weight is the attention that it gets, because a few keys may get most of it. `attended` (H,)
    are the squared logits of the sampled queries, under their attention.
    """

    def __init__(self, heads: int, kv_heads: int, width: int, *, normed: bool = False) -> None:
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.samples = 0
        self.tokens = 0  # queries
        self.raw = torch.zeros(heads, width, width, dtype=torch.float64)
        self.weighted = torch.zeros(heads, width, width, dtype=torch.float64)
        count, size = (heads + kv_heads, width + 1) if normed else (0, 0)
        self.lengths = torch.zeros(count, size, size, dtype=torch.float64)
        self.attended = torch.zeros(heads if normed else 0, dtype=torch.float64)

    def update(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        features: tuple[Tensor, Tensor] | None = None,
        queries: int = SAMPLED_QUERIES,
    ) -> None:
        """Add samples with queries q (B, H, n, d) and keys k (B, K, n, d), their first `width` dimensions rotated.

        `scale` is the softmax's; the mask (B, n) is True at real tokens. `features` (B, H or K, n, d + 1) of normed
        heads are defined in numerics.lengths. The attention of `queries` queries of each sample is computed.
        """
        q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
        self.samples += len(q)
        own = q.shape[-1]
        if features is not None:
            q, k = (torch.cat([x, f.to(x)], -1) for x, f in zip((q, k), features, strict=True))
        for q_all, k_all in same_lengths(q, k, mask):
            q_part, k_part = q_all[..., :own], k_all[..., :own]
            self.tokens += q_part.shape[0] * q_part.shape[2]
            rotated = q_part[..., : self.width], k_part[..., : self.width]
            blocks = query_blocks(*rotated, *((PAIR_BLOCKS, window) if causal else (1, None)))
            for asking, g_k in with_key_grams(blocks):
                self.raw += self._added(pair_moments(asking.mT @ asking, self._repeated(g_k)).sum(0))
            sampled = sampled_queries(q_part.shape[2], causal, window, queries)
            weighted, attention = self._attended(q_part, k_part, scale, *sampled)
            self.weighted += self._added(weighted)
            if features is not None:
                self.lengths += self._added(self._of_lengths(q_all[..., own:], k_all[..., own:], attention))
                self.attended += self._added(self._squares(q_part[:, :, sampled[0]], k_part, attention))

    def _of_lengths(self, f_q: Tensor, f_k: Tensor, attention: Tensor) -> Tensor:
        """The moments of lengths (H + K, d + 1, d + 1); a sample's keys have a weight of 1 on average."""
        received = attention.mean(2).unflatten(1, (self.kv_heads, -1)).mean(2)  # (B, K, n)
        weight = 0.5 + 0.5 * received[..., None] * received.shape[-1]
        return torch.cat([(f_q.mT @ f_q).sum(0), (f_k.mT @ (weight * f_k)).sum(0)])

    def _squares(self, asking: Tensor, k: Tensor, attention: Tensor) -> Tensor:
        """The squared logits (H,) of the sampled queries (B, H, M, d), under their attention (B, H, M, n)."""
        logits = asking @ self._repeated(k).mT
        return (attention * logits.square()).sum((0, 2, 3))

    def _attended(self, q: Tensor, k: Tensor, scale: float, sampled: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention-weighted pair moments (H, d, d), and the attention p (B, H, M, n) of the sampled queries.

        The moments pair q_m q_m^T of every sampled query m with the covariance of the keys under its attention p_m.
        """
        # A common mean of a sample's keys changes neither attention nor covariance, but it affects float32 rounding.
        every = self._repeated(k - k.mean(2, keepdim=True))
        asking = q[:, :, sampled]  # (B, H, M, d)
        attention = (scale * asking @ every.mT).masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        first, second = (half.contiguous() for half in every[..., : self.width].split(self.width // 2, -1))
        sums = q.new_zeros(4, len(q), self.heads, self.width // 2, self.width // 2)
        for m, query in enumerate(asking[..., : self.width].unbind(2)):
            seen = (~hidden[m]).nonzero()
            part = slice(int(seen[0]), int(seen[-1]) + 1)
            _add_moments(sums, query, first[:, :, part], second[:, :, part], attention[:, :, m, part, None])
        return _joined(sums.sum(1)), attention

    def _repeated(self, x: Tensor) -> Tensor:
        """Keys, or their Grams, once for every query head that shares them."""
        return x if self.heads == self.kv_heads else x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def _added(self, x: Tensor) -> Tensor:
        return x.to(sum_device(x)).double().to(self.raw.device)

    def group(self, g: int, *, weighted: bool) -> Tensor:
        """The moments (R, d, d) of the query heads that share key head g."""
        if self.samples == 0:
            raise StatisticsError("no samples were seen at this site")
        size = self.heads // self.kv_heads
        return (self.weighted if weighted else self.raw)[g * size : (g + 1) * size]

    def lengths_of(self, g: int) -> tuple[Tensor, Tensor]:
        """F (R, d + 1, d + 1) of the query heads that share key head g, and (d + 1, d + 1) of that head."""
        if not self.normed or self.samples == 0:
            raise StatisticsError("these statistics hold no lengths of heads, which QK-norm needs; calibrate again")
        size = self.heads // self.kv_heads
        return self.lengths[g * size : (g + 1) * size], self.lengths[self.heads + g]

    @property
    def normed(self) -> bool:
        return len(self.lengths) > 0

    def empty(self) -> PairSums:
        return PairSums(self.heads, self.kv_heads, self.width, normed=self.normed)

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(x).all()) for x in self.state().values())

    def __add__(self, other: PairSums) -> PairSums:
        mine, theirs = ((x.heads, x.kv_heads, x.width, x.normed) for x in (self, other))
        if mine != theirs:
            raise StatisticsError(
                f"pair sums of {self.heads} heads x {self.width} and of {other.heads} x {other.width} cannot be added"
            )
        both = self.empty()
        for name in ("samples", "tokens", "raw", "weighted", "lengths", "attended"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.samples, self.tokens])
        state = {"counts": counts, "raw": self.raw, "weighted": self.weighted}
        return {**state, "lengths": self.lengths, "attended": self.attended} if self.normed else state

    @classmethod
    def from_state(cls, heads: int, kv_heads: int, width: int, state: dict[str, Tensor]) -> PairSums:
        sums = cls(heads, kv_heads, width)
        sums.samples, sums.tokens = (int(count) for count in state["counts"])
        sums.raw, sums.weighted = state["raw"].double(), state["weighted"].double()
        if "lengths" in state and "attended" in state:
            sums.lengths, sums.attended = state["lengths"].double(), state["attended"].double()
            if len(sums.lengths) != heads + kv_heads:
                raise StatisticsError(f"lengths of {len(sums.lengths)} heads, but there are {heads} + {kv_heads}")
        return sums

    @staticmethod
    def shapes(heads: int, width: int) -> dict[str, tuple[int, ...]]:
        sums = {"counts": (2,), "raw": (heads, width, width), "weighted": (heads, width, width)}
        return {**sums, "lengths": (-1, width + 1, width + 1), "attended": (heads,)}


def sampled_queries(n: int, causal: bool, window: int | None, most: int = SAMPLED_QUERIES) -> tuple[Tensor, Tensor]:
    """Which queries (M,) of a sample of n tokens are sampled, and which keys (M, n) are hidden from them."""
    sampled = ((torch.arange(min(most, n)) + 0.5) * n / min(most, n)).long()
    back = sampled[:, None] - torch.arange(n)
    return sampled, (back < 0) | (back >= (window or n)) if causal else torch.zeros_like(back, dtype=torch.bool)


def _add_moments(sums: Tensor, query: Tensor, first: Tensor, second: Tensor, p: Tensor) -> None:
    """Add the moments of one query (B, H, d) and its keys, given as halves of pairs (B, H, n, d / 2), under p.

    In the complex z_j: Re and Im of z_i z_j, then of z_i conj(z_j). These take fewer passes than numerics.rotary's
    pair_moments, and three of the four quarters of the keys' covariance.
    """
    weighted = p * first, p * second  # (B, H, n, d / 2)
    means = [x.sum(2) for x in weighted]
    k11 = weighted[0].mT @ first - _outer(means[0], means[0])
    k21 = weighted[1].mT @ first - _outer(means[1], means[0])
    k22 = weighted[1].mT @ second - _outer(means[1], means[1])
    re, im = query.chunk(2, -1)
    q11, q21, q22 = _outer(re, re), _outer(im, re), _outer(im, im)
    for start, (a, b), (c, d) in (
        (0, (q11 - q22, q21.mT + q21), (k11 - k22, k21.mT + k21)),
        (2, (q11 + q22, q21 - q21.mT), (k11 + k22, k21 - k21.mT)),
    ):
        sums[start].addcmul_(a, c).addcmul_(b, d)
        sums[start + 1].addcmul_(b, c).addcmul_(a, d, value=-1)


def _joined(sums: Tensor) -> Tensor:
    """The moments (H, d, d) of x and y, from the four sums (4, H, d / 2, d / 2) of _add_moments."""
    re, im, re_conj, im_conj = sums / 2
    xx, yy, yx, xy = re_conj + re, re_conj - re, im + im_conj, im - im_conj
    return torch.cat([torch.cat([xx, xy], -1), torch.cat([yx, yy], -1)], -2)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]
