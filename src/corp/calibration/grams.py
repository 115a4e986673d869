"""Gram matrices of queries and keys, per sample (or block of its queries), of all heads of one attention."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.calibration.head_grams import FoldedHead, HeadGrams, SampledHead
from corp.calibration.moments import sum_device
from corp.calibration.query_blocks import query_blocks, same_lengths
from corp.errors import StatisticsError
from corp.numerics.linalg import pack, packed_size, unpack

FOLD_BLOCK = 256  # entries folded at once: one large product instead of many thin ones
# Blocks of queries per sample under a causal mask. Of the logits that b blocks count, a share of (b-1)/(2b) is spared:
# 3/8 with 4 of the 1/2 that do not exist. On a small OPT 4 and 8 blocks gave the same perplexity; memory grows with b.
CAUSAL_BLOCKS = 4


class Grams:
    """g_q = Q^T Q and g_k = K^T K of every entry and head, or the sum of their Kronecker products.

    An entry is a set of queries and the keys they see: a sample, or under a causal mask a block of its queries with
    all keys up to the block's end, or those in its window. Few entries are kept one by one (packed, float32 like the
    products they are), with the number and the sum of each entry's keys, from which the Grams of centred keys follow:
    softmax ignores what is constant along a row. Past the number at which that would be larger than
    sum_b vech(g_k) vech(g_q)^T, once with the keys as they are and once centred, they are folded into those sums
    (float64). Both hold all that any choice of dimensions or of subspaces needs.
    """

    def __init__(self, heads: int, width: int) -> None:
        self.heads, self.width = heads, width
        self.samples = 0
        self.tokens = 0  # queries
        self.entries = 0
        self._q: list[Tensor] = []  # each (b, H, t), t = d(d+1)/2
        self._k: list[Tensor] = []
        self._key_sum: list[Tensor] = []  # each (b, H, d)
        self._keys: list[Tensor] = []  # each (b,): how many
        self._pending = 0
        self.kron: Tensor | None = None  # (H, t, t): keys by queries
        self.centred_kron: Tensor | None = None  # the same of keys centred within their entry; there when kron is

    @property
    def fold_after(self) -> int:
        return folds_after(self.width)

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

        `causal` samples have as many queries as keys, and one mask, q_mask; their queries see the `window` last keys.
        """
        self.samples += len(q)
        if causal:
            for q_part, k_part in same_lengths(self._by_head(q), self._by_head(k), q_mask):
                self._add_causal(q_part.contiguous(), k_part.contiguous(), window)
            return
        q, k = self._by_head(_zeroed(q, q_mask)), self._by_head(_zeroed(k, k_mask))
        tokens = q.shape[0] * q.shape[2] if q_mask is None else int(q_mask.sum())
        keys = k.new_full((len(k),), k.shape[2]) if k_mask is None else k_mask.sum(1)
        self._append(_packed_gram(q), _packed_gram(k), k.sum(2), keys, tokens)

    def _add_causal(self, q: Tensor, k: Tensor, window: int | None) -> None:
        """Samples of one length n, q and k (B, H, n, d): an entry per block of queries."""
        for block in query_blocks(q, k, CAUSAL_BLOCKS, window):
            keys, tokens = k.new_full((len(k),), block.keys), len(q) * block.queries.shape[2]
            g_k = _to_sums(pack(block.key_gram))
            self._append(_packed_gram(block.queries), g_k, block.key_sum, keys, tokens)

    def _append(self, g_q: Tensor, g_k: Tensor, key_sum: Tensor, keys: Tensor, tokens: int) -> None:
        self._q.append(g_q)
        self._k.append(g_k)
        self._key_sum.append(_to_sums(key_sum))
        self._keys.append(_to_sums(keys).float())
        self.entries += len(g_q)
        self._pending += len(g_q)
        self.tokens += tokens
        if self.entries > self.fold_after and self._pending >= FOLD_BLOCK:
            self.fold()

    def _by_head(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        x = x.reshape(*x.shape[:2], self.heads, self.width).transpose(1, 2)  # (B, H, n, d)
        return x.contiguous()  # the copy costs less than products of strided matrices

    def empty(self) -> Grams:
        return Grams(self.heads, self.width)

    def to(self, device: torch.device) -> None:
        self._q, self._k, self._key_sum, self._keys = (
            [part.to(device) for part in parts] for parts in (self._q, self._k, self._key_sum, self._keys)
        )
        self.kron = None if self.kron is None else self.kron.to(device)
        self.centred_kron = None if self.centred_kron is None else self.centred_kron.to(device)

    def fold(self) -> None:
        """Move the entries held one by one into the sum of Kronecker products."""
        if not self._q:
            return
        if self.kron is None or self.centred_kron is None:
            t, device = packed_size(self.width), self._q[0].device
            self.kron, self.centred_kron = torch.zeros(2, self.heads, t, t, dtype=torch.float64, device=device)
        for h in range(self.heads):
            q_h, k_h = (torch.cat([part[:, h] for part in parts]).double() for parts in (self._q, self._k))  # (b, t)
            self.kron[h].addmm_(k_h.mT, q_h)
            self.centred_kron[h].addmm_(self._centred(h, k_h).mT, q_h)
        self._q, self._k, self._key_sum, self._keys, self._pending = [], [], [], [], 0

    def _centred(self, h: int, k: Tensor) -> Tensor:
        """The packed Grams (b, t) of head h's keys once each entry's mean is taken off: g_k - s s^T / n."""
        s = torch.cat([part[:, h] for part in self._key_sum]).double()  # (b, d)
        n = torch.cat(self._keys).double().clamp(min=1)  # an entry without keys has no sum either
        return k - pack(s[:, :, None] * s[:, None, :]) / n[:, None]

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(part).all()) for part in (*self._q[-1:], *self._k[-1:]))

    def head(self, h: int, *, centred: bool = False) -> HeadGrams:
        """The sums of one head, in float64; with keys `centred` within their entry, only what softmax notices."""
        if self.entries == 0:
            raise StatisticsError("no samples were seen at this site")
        if self.kron is not None and self.centred_kron is not None:
            self.fold()
            return FoldedHead(self.width, (self.centred_kron if centred else self.kron)[h])
        q, k = (torch.cat([part[:, h] for part in parts]).double() for parts in (self._q, self._k))
        return SampledHead(self.width, q, self._centred(h, k) if centred else k)

    def gram_sums(self) -> tuple[Tensor, Tensor] | None:
        """sum_b g_q and sum_b g_k, each (H, d, d) in float64; None once folded: the Kronecker sum holds neither."""
        if self.kron is not None:
            return None
        q, k = (torch.cat(parts).double().sum(0) for parts in (self._q, self._k))  # (H, t)
        return unpack(q, self.width), unpack(k, self.width)

    def __add__(self, other: Grams) -> Grams:
        if (self.heads, self.width) != (other.heads, other.width):
            raise StatisticsError(
                f"Grams of {self.heads} heads x {self.width} and of {other.heads} x {other.width} do not add"
            )
        both = Grams(self.heads, self.width)
        both.samples, both.tokens = self.samples + other.samples, self.tokens + other.tokens
        both.entries = self.entries + other.entries
        both._q, both._k = self._q + other._q, self._k + other._k
        both._key_sum, both._keys = self._key_sum + other._key_sum, self._keys + other._keys
        both._pending = self._pending + other._pending
        both.kron, both.centred_kron = _sum(self.kron, other.kron), _sum(self.centred_kron, other.centred_kron)
        if both.kron is not None or both.entries > both.fold_after:
            both.fold()
        return both

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, for a file: what is pending stays pending, so that a resumed run folds alike."""
        t = packed_size(self.width)
        parts = ((self._q, t), (self._k, t), (self._key_sum, self.width))
        q, k, key_sum = (torch.cat(p) if p else torch.zeros(0, self.heads, size) for p, size in parts)
        keys = torch.cat(self._keys) if self._keys else torch.zeros(0)
        counts = torch.tensor([self.samples, self.tokens, self.entries])
        state = {"counts": counts, "q": q, "k": k, "key_sum": key_sum, "keys": keys}
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
            grams._key_sum, grams._keys = [state["key_sum"]], [state["keys"]]
        grams.kron, grams.centred_kron = state.get("kron"), state.get("centred_kron")
        if (grams.kron is None) != (grams.centred_kron is None):
            raise StatisticsError("of the folded Grams only one of the two sums is there; calibrate again")
        return grams

    @staticmethod
    def shapes(heads: int, width: int) -> dict[str, tuple[int, ...]]:
        """What `state` holds, -1 where any length will do: checked before a stranger's file is read."""
        t = packed_size(width)
        entries = {"q": (-1, heads, t), "k": (-1, heads, t), "key_sum": (-1, heads, width), "keys": (-1,)}
        return {"counts": (3,), **entries, "kron": (heads, t, t), "centred_kron": (heads, t, t)}


def folds_after(width: int) -> int:
    """Entries: 2 t float32 each, against two sums of t^2 float64."""
    return 2 * packed_size(width)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of those that are there, never one of them itself."""
    if a is None or b is None:
        return next((x.clone() for x in (a, b) if x is not None), None)
    return a + b


def _packed_gram(x: Tensor) -> Tensor:
    """x^T x of (B, H, n, d), packed (B, H, t)."""
    return _to_sums(pack(x.mT @ x))


def _to_sums(x: Tensor) -> Tensor:
    return x.to(sum_device(x))


def _zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros where the mask (B, n) is False: such a token adds nothing to a Gram, whatever it held."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
