"""The self-check of narrowed heads under QK-norm: the error of their logits, computed from rows and norms.

It is the error of pruned pairs with exact lengths, plus what wrong lengths contribute (planning.normed.length_cost).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from corp.calibration.pairs import PairSums
from corp.numerics import rotary
from corp.numerics.lengths import Length, square_error
from corp.planning.fitting import split
from corp.planning.normed import length_cost
from corp.planning.site_plan import SitePlan
from corp.sites import AttentionSite, Rows, gains_of, rows_of
from corp.surgery.both import Both
from corp.surgery.row_maps import heads_in

ROWS_APART = 1e-2  # relative: more than the rounding of any dtype


class _Side(NamedTuple):
    """The effect of the queries' or keys' norm on the heads, in terms of the dense rows."""

    factor: Tensor  # (H, e / 2), complex: multiplies every pair after its own gains
    lengths: list[Length]


def normed_errors(both: Both, site: AttentionSite, rows: dict[str, Rows], site_plan: SitePlan) -> tuple[float, float]:
    """The squared error of all heads' logits: from pruned pairs, exact, and from wrong lengths, to first order."""
    q, k, kept = *_sides(both, site, rows, site_plan), site_plan.indices()
    sums = both.stats.pairs_of(site.name).total()
    of_pairs = of_lengths = 0.0
    for h in range(site.heads):
        g, i = divmod(h, site.heads // site.groups)
        pairs = kept[g][: len(kept[g]) // 2]
        c = q.factor[h] * k.factor[g].conj()
        system = rotary.pair_system(sums.group(g, weighted=both.weighted)[i], pairs, split(site.width // 2, pairs))
        of_pairs += rotary.error(system, torch.cat([c.real - 1, -c.imag]))
        squares = _squares(sums, site, kept[g], (g, i), (q.lengths[h], k.lengths[g]))
        of_lengths += length_cost(sums, h, squares, weighted=both.weighted)
    return of_pairs, of_lengths


def _squares(
    sums: PairSums, site: AttentionSite, dims: Tensor, which: tuple[int, int], lengths: tuple[Length, Length]
) -> tuple[float, float]:
    assert site.norm is not None
    g, i = which
    F_q, F_k = sums.lengths_of(g)
    return square_error(F_q[i], dims, lengths[0], site.norm.eps), square_error(F_k, dims, lengths[1], site.norm.eps)


def _sides(both: Both, site: AttentionSite, rows: dict[str, Rows], site_plan: SitePlan) -> tuple[_Side, _Side]:
    assert site.norm is not None
    kept, shared = site_plan.indices(), site.heads // site.groups
    of_queries, of_keys = gains_of(both.dense, site.norm)
    norms: Any = [both.pruned.get_submodule(name) for name in (site.norm.q, site.norm.k)]
    q = heads_in(rows_of(both.dense, site.q), rows_of(both.pruned, rows["q"]), site.heads)
    k = heads_in(rows_of(both.dense, site.k), rows_of(both.pruned, rows["k"]), site.groups)
    return (
        _side(q, norms[0], of_queries, [group for group in kept for _ in range(shared)], site.width),
        _side(k, norms[1], of_keys, kept, site.width),
    )


def _side(heads: list[tuple[Tensor, Tensor]], norm: Any, gain: Tensor, kept: list[Tensor], width: int) -> _Side:
    """The effect of one norm. Unchanged rows have a scale of 1; other scales show in lengths and gains."""
    scales = torch.stack([_scales(*rows, dims) for rows, dims in zip(heads, kept, strict=True)])  # (H, e)
    own, squares, offset = (x.detach().to(scales) for x in (norm.gain, norm.squares, norm.offset))
    cross = torch.zeros_like(own) if norm.cross is None else norm.cross.detach().to(scales)
    dense = torch.stack([gain.to(scales)[dims] for dims in kept])  # (H, e)
    factor = _factor(dense, own * scales, cross * scales.roll(scales.shape[1] // 2, 1))
    return _Side(factor, [Length(width * v * s**2, c) for v, s, c in zip(squares, scales, offset, strict=True)])


def _scales(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """The factor of each kept row (e, D + 1); NaN for rows that are not multiples of the dense ones."""
    rows = before[kept.to(before.device)]
    size = rows.square().sum(1)
    scales = torch.where(size > 0, (rows * after).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny), 1.0)
    apart = (after - scales[:, None] * rows).square().sum(1) > ROWS_APART**2 * size
    return scales.masked_fill(apart, torch.nan)


def _factor(dense: Tensor, gain: Tensor, cross: Tensor) -> Tensor:
    """The complex factors (H, e / 2) that are closest to the norm's effect on every pair, beyond the dense gains."""
    (d1, d2), (g1, g2), (c1, c2) = (x.chunk(2, dim=-1) for x in (dense, gain, cross))
    size = d1.square() + d2.square()
    some = size > 0  # a pair without gain is zero whatever it is multiplied by
    size = torch.where(some, size, 1.0)
    re, b = (g1 * d1 + g2 * d2) / size, (c1 * d2 - c2 * d1) / size
    return torch.complex(torch.where(some, re, 1.0), -b)
