"""The maps from the rows of dense heads to those of narrowed ones, computed from their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.numerics.place import in_float64
from corp.sites import Projection


def heads_in(old: Projection, new: Projection, count: int) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of every head, before and after, as rows (d, D + 1) and (e, D + 1)."""
    before, after = (_rows(part).unflatten(0, (count, -1)) for part in (old, new))
    return list(zip(before, after, strict=True))


def maps_in(old: Projection, new: Projection, count: int) -> list[Tensor]:
    return [map_between(before, after) for before, after in heads_in(old, new, count)]


def map_between(before: Tensor, after: Tensor) -> Tensor:
    """M (e, d) with M before = after."""
    found: Tensor = torch.linalg.lstsq(before.mT, after.mT, driver="gelsd").solution
    return found.mT


def _rows(part: Projection) -> Tensor:
    weight, bias = in_float64(*part)
    return torch.cat([weight, bias[:, None]], 1)
