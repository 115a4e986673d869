"""Queries and the keys they see: samples without their padding, and a causal mask in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """Some queries of samples of one length, and what is needed of the keys that they see."""

    queries: Tensor  # (B, H, m, d)
    key_gram: Tensor  # (B, K, d, d)
    key_sum: Tensor  # (B, K, d)
    keys: int


def same_lengths(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples (B, H, n, d) in groups of equal length, without their padding: blocks then depend on the sample alone.

    The mask (B, n) is True at real tokens; samples of nothing but padding are left out.
    """
    if mask is None:
        yield q, k
        return
    lengths = mask.sum(1)
    for length in [x for x in lengths.unique().tolist() if x]:
        rows = (lengths == length).nonzero()  # (b, 1)
        where = mask[rows[:, 0]].nonzero()[:, 1].unflatten(0, (-1, length))  # (b, length)
        yield q.transpose(1, 2)[rows, where].transpose(1, 2), k.transpose(1, 2)[rows, where].transpose(1, 2)


def query_blocks(q: Tensor, k: Tensor, blocks: int, window: int | None = None) -> Iterator[Block]:
    """So many blocks of queries, each with all keys up to its end, or of a window those that any of its queries sees.

    q (B, H, n, d), k (B, K, n, d). One block without a window is every query with every key.
    """
    gram, total, start = torch.zeros((), device=k.device), torch.zeros((), device=k.device), 0
    for part in q.tensor_split(min(blocks, q.shape[2]), dim=2):
        end = start + part.shape[2]
        first = start if window is None else max(0, start - window + 1)
        new = k[:, :, first:end]
        if window is None:  # keys that an earlier block saw are seen still
            gram, total, first = gram + new.mT @ new, total + new.sum(2), 0
        else:
            gram, total = new.mT @ new, new.sum(2)
        yield Block(part, gram, total, end - first)
        start = end
