"""The arithmetic of token merging: which tokens are similar, and how they and their sizes are merged.

The tokens after the prefix (class token, registers) are split into two alternating sets. Every token of the first set
points to the token of the second set with the most similar key; the `r` closest pairs become their size-weighted mean
(bipartite soft matching). Which tokens merge depends on the image, but their number does not, so all shapes are static.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Match(NamedTuple):
    """Which tokens are merged, by their index in the first or the second of the two alternating sets."""

    source: Tensor  # (B, r), of the first set
    kept: Tensor  # (B, a - r), the rest of the first set, in order
    target: Tensor  # (B, r), of the second set: what each source merges into


def match(keys: Tensor, r: int, prefix: int) -> Match:
    """The `r` most similar pairs by the cosine of the keys (B, n, d), of tokens after the prefix."""
    first, second = keys[:, prefix::2], F.normalize(keys[:, prefix + 1 :: 2], dim=-1)
    best, partner = (first @ second.mT).max(-1)  # (B, a): a token's own length does not change its nearest partner
    order = (best / torch.linalg.vector_norm(first, dim=-1)).topk(best.shape[1]).indices
    source, kept = order[:, :r], order[:, r:].sort().values  # neighbours stay neighbours, and can be paired later
    return Match(source, kept, partner.gather(1, source))


def merge(x: Tensor, sizes: Tensor, found: Match, prefix: int) -> tuple[Tensor, Tensor]:
    """Tokens x (B, n, C) and sizes (B, n) with every source merged into its target: prefix, kept, second set."""
    b = x[:, prefix + 1 :: 2]
    size_a, size_b = sizes[:, prefix::2], sizes[:, prefix + 1 :: 2]
    moved = size_a.gather(1, found.source)  # (B, r)
    # A product with a few columns is faster than a scatter, and adds in the same order every time.
    into = (found.target[:, None] == torch.arange(b.shape[1], device=x.device)[:, None]).to(x.dtype)  # (B, b, r)
    grown = size_b + (into @ moved[..., None])[..., 0]
    share = into * (moved[:, None] / grown[..., None])
    left, right = rows(x, prefix + 2 * torch.cat([found.kept, found.source], 1)).split(
        [found.kept.shape[1], found.source.shape[1]], 1
    )
    merged = torch.baddbmm(b * (size_b / grown)[..., None], share, right)
    tokens = torch.cat([x[:, :prefix], left, merged], 1)
    return tokens, torch.cat([sizes[:, :prefix], size_a.gather(1, found.kept), grown], 1)


def regroup(groups: Tensor, found: Match, prefix: int) -> Tensor:
    """Where every dense token (B, N) is after a merge, from where it was before."""
    r, left = found.source.shape[1], found.kept.shape[1]
    here = torch.arange(prefix + left + groups.shape[1], device=groups.device).expand(len(groups), -1)
    first = torch.cat([found.kept, found.source], 1)  # (B, a): the new order of the first set
    place = torch.cat([here[:, prefix : prefix + left], prefix + left + found.target], 1)
    behind = torch.empty_like(first).scatter(1, first, place)  # (B, a)
    # The second set follows in order; tokens alternate between the sets, and an odd last one is in the first.
    second = here[:, prefix + left : prefix + left + left + r]
    both = torch.stack([behind, second], 2).flatten(1)
    return torch.cat([here[:, :prefix], both], 1).gather(1, groups)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] of x (B, n, C) and index (B, m)."""
    # Whole rows are copied at once: five times as fast as a gather of single numbers.
    flat = index + x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    found: Tensor = x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape)
    return found
