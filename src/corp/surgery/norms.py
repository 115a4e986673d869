"""The norm of narrowed heads: it divides by a length that is predicted from the kept dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corp.numerics.lengths import Length
from corp.planning.site_plan import NormFold
from corp.sites import AttentionSite, gains_of
from corp.surgery.linear import new_parameter


class NarrowNorm(nn.Module):
    """y = (gain x + cross swap(x)) / sqrt(sum squares x^2 + offset), with separate numbers for every head.

    swap exchanges the two dimensions of every rotary pair (j, j + e/2): `cross` is the part of a pair's correction that
    rotates it. Keys are not corrected and have none. Computed in float32 at least, like the dense norms.
    """

    def __init__(self, like: Tensor, gain: Tensor, cross: Tensor | None, squares: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.gain = new_parameter(gain, like)  # (H, e)
        self.cross = None if cross is None else new_parameter(cross, like)  # (H, e)
        self.squares = new_parameter(squares, like)  # (H, e)
        self.offset = new_parameter(offset, like)  # (H,)

    def extra_repr(self) -> str:
        return f"heads={self.gain.shape[0]}, width={self.gain.shape[1]}"

    def forward(self, x: Tensor) -> Tensor:
        """Heads (B, H, n, e)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        s = (wide.square() * self.squares[:, None]).sum(-1, keepdim=True) + self.offset[:, None, None]
        y = wide * self.gain[:, None]
        if self.cross is not None:
            first, second = wide.chunk(2, dim=-1)
            y = y + torch.cat([second, first], -1) * self.cross[:, None]
        return (y * s.rsqrt()).to(x.dtype)


def narrow_norms(
    model: nn.Module, site: AttentionSite, kept: Sequence[Tensor], fold: NormFold | None
) -> tuple[NarrowNorm, NarrowNorm]:
    """The norms of queries and keys whose heads keep the dimensions kept[g] (e,); without `fold`, lengths are plain."""
    assert site.norm is not None
    gains, shared = gains_of(model, site.norm), site.heads // site.groups
    norms: list[Any] = [model.get_submodule(name) for name in (site.norm.q, site.norm.k)]
    sides = ([group for group in kept for _ in range(shared)], list(kept))
    made = []
    for letter, norm, gain, dims in zip("qk", norms, gains, sides, strict=True):
        own = torch.stack([gain[which.to(gain.device)] for which in dims])  # (H, e)
        lengths = _plain(site, dims, own) if fold is None else getattr(fold, letter)
        squares = torch.stack([length.v for length in lengths]) / site.width
        offset = torch.stack([length.c for length in lengths])
        cross = None
        if letter == "q":
            own, cross = _corrected(own, None if fold is None else fold.ab)
        made.append(NarrowNorm(norm.weight, own, cross, squares, offset).train(norm.training))
    return made[0], made[1]


def _corrected(gain: Tensor, corrections: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Gain and cross (H, e) that multiply every pair, after its own gains, by 1 + a - i b."""
    if corrections is None:
        return gain, torch.zeros_like(gain)
    a, b = torch.stack(list(corrections)).chunk(2, dim=-1)  # (H, e / 2)
    gain = gain.to(a)
    first, second = gain.chunk(2, dim=-1)
    return gain * (1 + torch.cat([a, a], -1)), torch.cat([b * second, -b * first], -1)


def _plain(site: AttentionSite, dims: Sequence[Tensor], like: Tensor) -> list[Length]:
    """Lengths that use the mean square of the kept dimensions in place of that of all."""
    assert site.norm is not None
    v = like.new_full((len(dims[0]),), site.width / len(dims[0]))
    return [Length(v, like.new_tensor(site.norm.eps))] * len(dims)
