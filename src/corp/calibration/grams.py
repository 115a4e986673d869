"""Gram matrices of queries and keys, per sample (or block of its queries), of all heads of one attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.calibration.head_grams import FoldedHead, HeadGrams, SampledHead
from corp.calibration.moments import sum_device
from corp.calibration.query_blocks import query_blocks, same_lengths
from corp.errors import StatisticsError
from corp.numerics.linalg import pack, packed_outer, packed_size, triangle, unpack

FOLD_BLOCK = 256  # entries folded at once: one large product instead of many thin ones
# Blocks of queries per sample under a causal mask. Half of all logits are masked; b blocks leave out a share of
# (b-1)/(2b): 3/8 with 4 blocks. On a small OPT 4 and 8 blocks gave the same perplexity; memory grows with b.
CAUSAL_BLOCKS = 4


class Keys(NamedTuple):
    """The keys of every entry: their packed Grams about their mean, that mean, and their number."""

    gram: Tensor  # (B, H, t), in the dtype of the products; joined ones in float64
    mean: Tensor  # (B, H, d), float64
    number: Tensor  # (B,), float64

    def joined(self, more: Keys) -> Keys:
        """These keys and more, without a difference of large numbers: each Gram is relative to its own mean."""
        number = self.number + more.number
        away, share = more.mean - self.mean, (more.number / number)[:, None, None]
        gram = self.gram + more.gram + (self.number[:, None, None] * share) * packed_outer(away)
        return Keys(gram, self.mean + share * away, number)


def about_mean(k: Tensor, mask: Tensor | None = None) -> Keys:
    """The keys k (B, H, n, d) as one entry per sample; the mask (B, n) is True at real tokens.

    Products are formed about the mean as rounded to the keys' dtype, and the mean is corrected for that rounding. The
    Gram's error is of second order in it: below the rounding of the products up to means of 1,000 standard deviations.
    """
    count = k.new_full((len(k),), k.shape[2]) if mask is None else mask.sum(1)
    count = count.clamp(min=1)[:, None, None]  # an entry without keys has no sum either
    shift = _zeroed(k, mask).sum(2) / count  # (B, H, d)
    y = _zeroed(k - shift[:, :, None], mask)
    gram, total = _to_sums(pack(y.mT @ y)), _to_sums(y.sum(2)).double()
    n = _to_sums(count).double()
    return Keys(gram, _to_sums(shift).double() + total / n, n[:, 0, 0])


class Grams:
    """g_q = Q^T Q and g_k = K^T K of every entry and head, or the sum of their Kronecker products.

    An entry is a set of queries and the keys they see: a sample, or under a causal mask a block of its queries with
    all keys up to the block's end, or those in its window. A few entries are stored separately (packed, in the float32
    of their products), with keys centred about their mean m, together with m and the number n of keys (float64):
    softmax ignores constants along a row, and the uncentred g_k is the centred one plus n m m^T. Once separate entries
    would take more memory than sum_b vech(g_k) vech(g_q)^T, with uncentred and with centred keys, they are folded into
    those two sums (float64). Either form supports any choice of dimensions or subspaces.
    """

    def __init__(self, heads: int, width: int) -> None:
        self.heads, self.width = heads, width
        self.samples = 0
        self.tokens = 0  # queries
        self.entries = 0
        self._q: list[Tensor] = []  # each (b, H, t), t = d(d+1)/2
        self._k: list[Tensor] = []  # about the entry's mean key
        self._key_mean: list[Tensor] = []  # each (b, H, d), float64
        self._keys: list[Tensor] = []  # each (b,), float64: number of keys
        self._pending = 0
        self._trace = torch.zeros((), dtype=torch.float64)  # of all Grams: not finite if any of them is not
        self.kron: Tensor | None = None  # (H, t, t): keys by queries
        self.centred_kron: Tensor | None = None  # the same for keys centred within their entry; present if kron is

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
        """Add samples with queries q (B, n, H d) and keys k (B, m, H d); masks (B, n), (B, m) are True at real tokens.

        `causal` samples have as many queries as keys, and one mask, q_mask; their queries see the last `window` keys.
        """
        self.samples += len(q)
        if causal:
            for q_part, k_part in same_lengths(self._by_head(q), self._by_head(k), q_mask):
                self._add_causal(q_part.contiguous(), k_part.contiguous(), window)
            return
        q, k = self._by_head(q), self._by_head(k)
        tokens = q.shape[0] * q.shape[2] if q_mask is None else int(q_mask.sum())
        self._append(_zeroed(q, q_mask), about_mean(k, k_mask), tokens)

    def _add_causal(self, q: Tensor, k: Tensor, window: int | None) -> None:
        """Samples of one length n, q and k (B, H, n, d): an entry per block of queries."""
        seen: Keys | None = None
        for queries, keys, fresh in query_blocks(q, k, CAUSAL_BLOCKS, window):
            new = about_mean(keys)
            seen = new if fresh or seen is None else seen.joined(new)
            self._append(queries, seen, len(q) * queries.shape[2])

    def _append(self, q: Tensor, keys: Keys, tokens: int) -> None:
        """Add entries with the queries q (B, H, n, d)."""
        g_q = _to_sums(pack(q.mT @ q))
        self._q.append(g_q)
        self._k.append(keys.gram.to(g_q.dtype))
        self._key_mean.append(keys.mean)
        self._keys.append(keys.number)
        self._trace = self._trace.to(g_q.device) + sum(part.sum(dtype=torch.float64) for part in (g_q, *keys[:2]))
        self.entries += len(g_q)
        self._pending += len(g_q)
        self.tokens += tokens
        if self.entries > folds_after(self.width) and self._pending >= FOLD_BLOCK:
            self.fold()

    def _by_head(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        x = x.reshape(*x.shape[:2], self.heads, self.width).transpose(1, 2)  # (B, H, n, d)
        return x.contiguous()  # the copy costs less than products of strided matrices

    def empty(self) -> Grams:
        return Grams(self.heads, self.width)

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of fits: float64 unless these sums were moved to a device without it."""
        return self._key_mean[0].dtype if self._key_mean else torch.float64

    def fold(self) -> None:
        """Add the separate entries to the sum of Kronecker products."""
        if not self._q:
            return
        if self.kron is None or self.centred_kron is None:
            t, device = packed_size(self.width), self._q[0].device
            self.kron, self.centred_kron = torch.zeros(2, self.heads, t, t, dtype=self._wide, device=device)
        for h in range(self.heads):
            q = _of_head(self._q, h, self._wide).mT
            self.kron[h].addmm_(self._keys_of(h, centred=False), q)
            self.centred_kron[h].addmm_(self._keys_of(h, centred=True), q)
        self._q, self._k, self._key_mean, self._keys, self._pending = [], [], [], [], 0

    def _keys_of(self, h: int, *, centred: bool) -> Tensor:
        """The packed Grams (t, b) of head h's keys, centred, or uncentred by adding n m m^T."""
        gram = _of_head(self._k, h, self._wide)
        if centred:
            return gram
        mean, (rows, columns) = _of_head(self._key_mean, h, self._wide), triangle(self.width, gram.device)
        return gram.addcmul_(mean[rows], (mean * torch.cat(self._keys))[columns])

    @property
    def finite(self) -> bool:
        """Whether all added activations were finite."""
        return bool(torch.isfinite(self._trace))

    def head(self, h: int, *, centred: bool = False) -> HeadGrams:
        """The sums of one head; with keys `centred` within their entry, constants that softmax ignores are removed."""
        if self.entries == 0:
            raise StatisticsError("no samples were seen at this site")
        if self.kron is not None and self.centred_kron is not None:
            self.fold()
            return FoldedHead(self.width, (self.centred_kron if centred else self.kron)[h])
        return SampledHead(self.width, _of_head(self._q, h, self._wide), self._keys_of(h, centred=centred))

    def gram_sums(self) -> tuple[Tensor, Tensor] | None:
        """sum_b g_q and sum_b g_k, each (H, d, d) in float64; None once folded, as Kronecker sums lack them."""
        if self.kron is not None:
            return None
        q, k, mean = (torch.cat(parts).double() for parts in (self._q, self._k, self._key_mean))
        k = k.sum(0) + (torch.cat(self._keys)[:, None, None] * packed_outer(mean)).sum(0)  # (H, t)
        return unpack(q.sum(0), self.width), unpack(k, self.width)

    def __add__(self, other: Grams) -> Grams:
        if (self.heads, self.width) != (other.heads, other.width):
            raise StatisticsError(
                f"Grams of {self.heads} heads x {self.width} and of {other.heads} x {other.width} cannot be added"
            )
        both = Grams(self.heads, self.width)
        both.samples, both.tokens = self.samples + other.samples, self.tokens + other.tokens
        both.entries = self.entries + other.entries
        both._q, both._k = self._q + other._q, self._k + other._k
        both._key_mean, both._keys = self._key_mean + other._key_mean, self._keys + other._keys
        both._trace = self._trace + other._trace.to(self._trace.device)
        both._pending = self._pending + other._pending
        both.kron, both.centred_kron = _sum(self.kron, other.kron), _sum(self.centred_kron, other.centred_kron)
        if both.kron is not None or both.entries > folds_after(both.width):
            both.fold()
        return both

    def state(self) -> dict[str, Tensor]:
        """The whole state as tensors, for a file; entries stay separate, so that a resumed run folds the same way."""
        shapes = self.shapes(self.heads, self.width)
        state = {"counts": torch.tensor([self.samples, self.tokens, self.entries])}
        for name, parts in (("q", self._q), ("k", self._k), ("key_mean", self._key_mean), ("keys", self._keys)):
            state[name] = torch.cat(parts) if parts else torch.zeros(0, *shapes[name][1:], dtype=torch.float64)
        if self.kron is not None and self.centred_kron is not None:
            state |= {"kron": self.kron, "centred_kron": self.centred_kron}
        return state

    @classmethod
    def from_state(cls, heads: int, width: int, state: dict[str, Tensor]) -> Grams:
        grams = cls(heads, width)
        grams.samples, grams.tokens, grams.entries = (int(count) for count in state["counts"])
        grams._pending = len(state["q"])
        if grams._pending:
            grams._q, grams._k = [state["q"]], [state["k"]]
            grams._key_mean, grams._keys = [state["key_mean"]], [state["keys"]]
        grams.kron, grams.centred_kron = state.get("kron"), state.get("centred_kron")
        if (grams.kron is None) != (grams.centred_kron is None):
            raise StatisticsError("one of the two sums of the folded Grams is missing; calibrate again")
        return grams

    @staticmethod
    def shapes(heads: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shapes of `state`, with -1 for any length; checked before an untrusted file is read."""
        t = packed_size(width)
        entries = {"q": (-1, heads, t), "k": (-1, heads, t), "key_mean": (-1, heads, width), "keys": (-1,)}
        return {"counts": (3,), **entries, "kron": (heads, t, t), "centred_kron": (heads, t, t)}


def folds_after(width: int) -> int:
    """The number of entries, 2 t float32 each, that take as much memory as two sums of t^2 float64."""
    return 2 * packed_size(width)


def _of_head(parts: list[Tensor], h: int, dtype: torch.dtype) -> Tensor:
    """Head h of entries (b, H, t) each, one column per entry: (t, b), a copy."""
    return torch.cat([part[:, h] for part in parts]).to(dtype).mT.clone(memory_format=torch.contiguous_format)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of those that are not None, as a new tensor."""
    if a is None or b is None:
        return next((x.clone() for x in (a, b) if x is not None), None)
    return a + b


def _to_sums(x: Tensor) -> Tensor:
    return x.to(sum_device(x))


def _zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, n, d) with zeros where the mask (B, n) is False, so that such a token adds nothing."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)
