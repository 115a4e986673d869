"""Queries and the keys they see: samples without padding, and a causal mask in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """Some queries of samples of equal length, and keys that they see."""

    queries: Tensor  # (B, H, m, d)
    keys: Tensor  # (B, K, n, d)
    fresh: bool  # whether they see these keys only, or also all keys of the blocks before


def same_lengths(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples (B, H, n, d) in groups of equal length, without padding, so that blocks depend on the sample alone.

    The mask (B, n) is True at real tokens; samples that are all padding are left out.
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
    """The queries in blocks, each with all keys up to its end or, with a window, those that any of its queries sees.

    q (B, H, n, d), k (B, K, n, d). One block without a window pairs every query with every key.
    """
    start = 0
    for part in q.tensor_split(min(blocks, q.shape[2]), dim=2):
        end = start + part.shape[2]
        first = start if window is None else max(0, start - window + 1)
        yield Block(part, k[:, :, first:end], window is not None or start == 0)
        start = end


def with_key_grams(blocks: Iterable[Block]) -> Iterator[tuple[Tensor, Tensor]]:
    """The queries (B, H, m, d) of every block, and K^T K (B, K, d, d) of all keys that they see."""
    gram = torch.zeros(())
    for queries, keys, fresh in blocks:
        new = keys.mT @ keys
        gram = new if fresh else gram + new
        yield queries, gram
