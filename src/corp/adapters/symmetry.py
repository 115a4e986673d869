"""The symmetries that pruning relies on: what a trial does to the outputs of a site's layers, and how it is undone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from corp.sites import AttentionSite, MLPSite, Rows, Site, ValueSite

Change = Callable[[Tensor], Tensor]
Changing = Callable[[Site], list[tuple[Rows, Change]]]
SKETCHED = 4  # numbers that stand for the features of a position


def made_by(site: Site) -> tuple[Rows, ...]:
    """The rows whose outputs are the site's channels or dimensions."""
    if isinstance(site, MLPSite):
        return site.up
    if isinstance(site, ValueSite):
        return (site.v,)
    if site.norm is not None:  # one head: the norm is applied head by head
        return Rows(site.norm.q, 0, site.width), Rows(site.norm.k, 0, site.width)
    return site.q, site.k


def noise(name: str, like: Tensor) -> Tensor:
    """Normal numbers in the shape of `like`, the same for the same name."""
    return torch.randn(like.shape, generator=_drawn(name), dtype=torch.float32).to(like.device, like.dtype)


def sketch(name: str, x: Tensor) -> Tensor:
    """x (..., C) by a few random sums of its features (..., 4): where x changes, they do, and they are small."""
    sums = noise(f"{name}/sketch", x.new_empty(x.shape[-1], min(SKETCHED, x.shape[-1]), dtype=torch.float32))
    # Data with NaN, and rows that a mask hides altogether, are for calibration to refuse: here only changes count.
    return x.to(sums.dtype).nan_to_num(0.0, 0.0, 0.0) @ sums


def _drawn(name: str) -> torch.Generator:
    """A generator for a name, so that sites that share something are transformed differently."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def transformed(site: Site) -> list[tuple[Rows, Change]]:
    if isinstance(site, MLPSite):
        order, changed = _channels(site)

        def shuffle(x: Tensor, seed: int) -> Tensor:
            x = torch.where(changed.to(x.device), noise(f"{site.name}/{seed}", x), x)
            return x[..., order.to(x.device)]

        return [(rows, partial(shuffle, seed=i)) for i, rows in enumerate(site.up)]
    if isinstance(site, ValueSite):
        return [(site.v, lambda x: by_head(x, value_maps(site)))]
    A = query_maps(site)[: 1 if site.norm else None]  # (K, d, d), or one for all heads
    back = torch.linalg.inv(A).mT
    shared = 1 if site.norm else site.heads // site.groups
    q, k = made_by(site)
    return [(q, lambda x: by_head(x, A.repeat_interleave(shared, 0))), (k, lambda x: by_head(x, back))]


def other_queries(site: Site) -> list[tuple[Rows, Change]]:
    """Other queries and keys in the first half of the samples: where nothing changes, a trial would prove nothing.

    Not scaled ones: a norm would hide that. The other half of the samples must not change.
    """
    if not isinstance(site, AttentionSite):
        return []

    def half(x: Tensor, seed: int) -> Tensor:
        first = torch.arange(len(x), device=x.device) < max(1, len(x) // 2)
        return torch.where(first.view(-1, *[1] * (x.dim() - 1)), noise(f"{site.name}/control/{seed}", x), x)

    return [(rows, partial(half, seed=i)) for i, rows in enumerate(made_by(site))]


def undone(site: Site, z: Tensor) -> Tensor:
    """The input of a consuming layer in a trial, with the transformation undone."""
    if isinstance(site, MLPSite):
        return torch.empty_like(z).index_copy(-1, _channels(site)[0].to(z.device), z)
    if isinstance(site, ValueSite):
        back = torch.linalg.inv(value_maps(site))
        return by_head(z, back.repeat_interleave(site.heads // site.groups, 0))
    return z


def permuted(site: MLPSite, x: Tensor) -> Tensor:
    """The inverse of `undone`."""
    return x[..., _channels(site)[0].to(x.device)]


def compared(site: Site, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """The parts that must agree: for an MLP, the channels that were not changed."""
    if isinstance(site, MLPSite):
        same = ~_channels(site)[1].to(before.device)
        return before[..., same], after[..., same]
    return before, after


def _channels(site: MLPSite) -> tuple[Tensor, Tensor]:
    """A permutation (D,), and which channels are changed (D,), about half of them."""
    generator = _drawn(site.name)
    order = torch.randperm(site.width, generator=generator)
    order = order if site.width > 2 else order.sort().values.flip(0)  # for two channels, not the identity
    changed = torch.randperm(site.width, generator=generator) < site.width // 2
    return order, changed


def value_maps(site: ValueSite) -> Tensor:
    return torch.stack([_mixing(site.width, f"{site.name}/{g}") for g in range(site.groups)])


def query_maps(site: AttentionSite) -> Tensor:
    """Maps (K, d, d): arbitrary ones of plain dimensions; rotations and scalings of each rotary pair."""
    return torch.stack([_query_map(site, f"{site.name}/{g}") for g in range(site.groups)])


def _query_map(site: AttentionSite, head: str) -> Tensor:
    generator = _drawn(head)
    p = site.rotary_dims // 2
    angle, size = (torch.rand(p, generator=generator, dtype=torch.float64) for _ in range(2))
    re, im = (torch.diag((0.6 + size) * part) for part in ((6.28 * angle).cos(), (6.28 * angle).sin()))
    pairs = torch.cat([torch.cat([re, -im], 1), torch.cat([im, re], 1)])  # (2p, 2p)
    return torch.block_diag(pairs, _mixing(site.plain_width, head)) if site.plain_width else pairs


def _mixing(d: int, head: str) -> Tensor:
    """A well-conditioned map (d, d) that is neither orthogonal nor diagonal."""
    generator = _drawn(f"{head}/mixing")
    Q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    scaled: Tensor = Q * (0.6 + torch.rand(d, generator=generator, dtype=torch.float64))
    return scaled


def by_head(x: Tensor, maps: Tensor) -> Tensor:
    """x (..., H d) with every head's dimensions mapped by maps (H, d, d)."""
    maps = maps.to(x.device, torch.float32 if x.dtype != torch.float64 else x.dtype)
    heads = x.to(maps.dtype).unflatten(-1, (len(maps), -1))
    return torch.einsum("...hd,hed->...he", heads, maps).flatten(-2).to(x.dtype)
