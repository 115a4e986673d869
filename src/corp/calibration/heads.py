"""Queries and keys of one call of an attention, head by head: split, rotated, normed, and their lengths before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from corp.numerics.lengths import length_features
from corp.numerics.rotary import rotate
from corp.sites import AttentionSite


class Heads(NamedTuple):
    """Queries (B, H, n, d) and keys (B, K, m, d) as they enter the logits, and which of them are real.

    If the attention normalises them, they are normalised, and `features` describe their lengths before that.
    Logits are multiplied by `scale` before the softmax.
    """

    q: Tensor
    k: Tensor
    q_mask: Tensor | None = None
    k_mask: Tensor | None = None
    causal: bool = False
    features: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0

    def joined(self, first: int = 0) -> tuple[Tensor, Tensor]:
        """Queries (B, n, H e) and keys (B, m, K e), of each head the e dimensions from `first` on."""
        q, k = (x[..., first:].transpose(1, 2).flatten(2) for x in (self.q, self.k))
        return q, k


def split_heads(
    site: AttentionSite, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Queries (B, n, H d) and keys (B, m, K d) -> (B, H, n, d) and (B, K, m, d), rotated if `angles` are given."""
    q, k = q.unflatten(-1, (site.heads, -1)).transpose(1, 2), k.unflatten(-1, (site.groups, -1)).transpose(1, 2)
    if angles:
        q, k = (_rotated(x, site.rotary_dims, *angles) for x in (q, k))
    return q, k


def _rotated(x: Tensor, dims: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, H, n, d), the first `dims` dimensions rotated; in float32 at least, like the products to come."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.cat([rotate(x[..., :dims], cos[:, None].to(x), sin[:, None].to(x)), x[..., dims:]], -1)


def normed(model: nn.Module, site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, n, H d) and keys (B, n, K d) after the model's own norms of every head."""
    assert site.norm is not None
    norms = ((site.norm.q, site.heads, q), (site.norm.k, site.groups, k))
    q, k = (model.get_submodule(name)(x.unflatten(-1, (heads, -1))).flatten(2) for name, heads, x in norms)
    return q, k


def lengths_of(site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """The features for numerics.lengths, from queries and keys before their norms; None without norms."""
    if site.norm is None:
        return None
    q, k = (x.unflatten(-1, (count, -1)).transpose(1, 2) for x, count in ((q, site.heads), (k, site.groups)))
    return length_features(q, site.norm.eps), length_features(k, site.norm.eps)
