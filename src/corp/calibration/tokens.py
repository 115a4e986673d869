"""Tokens of a batch by sample: which are real, and which of them are used."""

from __future__ import annotations

import torch
from torch import Tensor

from corp.errors import StatisticsError
from corp.sites import Mask

GOLDEN = 0.6180339887498949  # the fraction whose multiples are spread most evenly


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, n, D) -> (N, D) without padding."""
    return x.reshape(-1, x.shape[-1]) if mask is None else x[mask]


def choose_tokens(x: Tensor, tokens: int, first_sample: int, mask: Tensor | None = None) -> Tensor | None:
    """(B, n, D) -> (m, D): `tokens` of every sample's real ones, one from each of as many equal stretches.

    The position of a token in its stretch varies between stretches and samples: patches are ordered row by row, so
    equal steps could select a single column of an image. The choice depends only on the sample and its index, not on
    how samples are batched, padded or distributed to workers. None means all; samples that are shorter than `tokens`
    contribute all their tokens.
    """
    if x.dim() != 3 or tokens == 0:
        return None
    B, n, D = x.shape
    lengths = torch.full((B, 1), n) if mask is None else mask.sum(1, keepdim=True).cpu()  # (B, 1)
    if tokens >= int(lengths.max()):
        return None
    bounds = torch.arange(tokens + 1) * lengths // tokens  # (B, m + 1): the ends of stretches
    order = torch.arange(first_sample, first_sample + B)[:, None] + torch.arange(tokens)  # (B, m)
    within = order.double() * GOLDEN % 1 * (bounds[:, 1:] - bounds[:, :-1])
    chosen = bounds[:, :-1] + within.long()
    short = lengths <= tokens
    chosen = torch.where(short, torch.arange(tokens), chosen)
    valid = ~short | (chosen < lengths)  # (B, m)
    if mask is not None:  # from a rank among the real tokens to a position in the padded sequence
        order = mask.cpu().to(torch.int8).argsort(dim=1, descending=True, stable=True)
        chosen = order.gather(1, chosen.clamp(max=n - 1))
    flat = (torch.arange(B)[:, None] * n + chosen)[valid]
    return x.reshape(B * n, D).index_select(0, flat.to(x.device))  # three times as fast as indexing


def as_batch(x: Tensor) -> Tensor:
    """x as (B, n, C); an unbatched (n, C) is one sample, and (B, h, w, C) has h w tokens."""
    return x[None] if x.dim() == 2 else x.flatten(1, -2)


def of_same_samples(q: Tensor, k: Tensor, *, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys as (B, n, C), also for a class token's query without length, or learned ones without batch."""
    if q.dim() < k.dim():
        q = q[:, None] if len(q) == len(k) else q[None]
    q, k = (as_batch(x) if batch_first else x.transpose(0, 1) for x in (q, k))
    samples = max(len(q), len(k))
    q, k = (x.expand(samples, -1, -1) if len(x) == 1 else x for x in (q, k))
    return q, k


def as_samples(x: Tensor, mask: Tensor | None, size: int, *, batch_first: bool) -> Tensor:
    """Tokens by sample, also of models that flatten (B, n, D) to (B n, D) before the MLP or put the sequence first."""
    if x.dim() == 3:
        return x if batch_first else x.transpose(0, 1)
    if x.dim() != 2:
        return x.reshape(len(x), -1, x.shape[-1])
    samples = size if mask is None else len(mask)
    return x.unflatten(0, (samples, -1)) if len(x) % samples == 0 else x[None]


def fitting(mask: Tensor | None, x: Tensor, where: Mask | None) -> Tensor | None:
    if mask is None or mask.shape == x.shape[:2]:
        return None if mask is None else mask.to(x.device)
    argument = where.argument if where else "the mask"
    raise StatisticsError(
        f"{argument} has shape {tuple(mask.shape)}, but {tuple(x.shape[:2])} tokens pass by; "
        "calibrate on whole sequences, without a key-value cache"
    )
