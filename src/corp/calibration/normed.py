"""Queries and keys under QK-norm: what the norms make of them, and their lengths before."""

from __future__ import annotations

from torch import Tensor, nn

from corp.numerics.lengths import length_features
from corp.sites import AttentionSite


def normed(model: nn.Module, site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, n, H d) and keys (B, n, K d) as the model's own norms leave every head."""
    assert site.norm is not None
    norms = ((site.norm.q, site.heads, q), (site.norm.k, site.groups, k))
    q, k = (model.get_submodule(name)(x.unflatten(-1, (heads, -1))).flatten(2) for name, heads, x in norms)
    return q, k


def lengths_of(site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """What numerics.lengths needs of queries and keys before their norms, (B, heads, n, d + 1); None without norms."""
    if site.norm is None:
        return None
    q, k = (x.unflatten(-1, (count, -1)).transpose(1, 2) for x, count in ((q, site.heads), (k, site.groups)))
    return length_features(q, site.norm.eps), length_features(k, site.norm.eps)
