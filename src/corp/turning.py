"""Rotated queries and keys as a narrowed attention computes them, beside the dense one's, on data.

Their logits differ by what the sums predict (verifying.py): of all logits up to blocks, or where pairs were chosen by
what attention notices, the variance of each row's error under the dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.errors import ModelError
from corp.sites import AttentionSite
from corp.stats import Grams
from corp.stats.blocks import query_blocks, same_lengths
from corp.stats.collect import Collector, turned_heads
from corp.stats.pairs import PAIR_BLOCKS, looked_at_of


class Enough(BaseException):
    """Raised inside a forward pass once what was wanted has passed by; no error, so that no model takes it for one."""


class Turned(NamedTuple):
    """Queries (B, H, n, d) and keys (B, K, n, d) as their logits are made of them, and what of them counts."""

    q: Tensor
    k: Tensor
    mask: Tensor | None = None
    causal: bool = False


class _Watcher(Collector):
    seen: Turned | None = None

    def add(self, site: AttentionSite, q: Tensor, k: Tensor, *rest: Any) -> None:
        mask, _, causal, angles = rest
        assert site.rotary is not None
        q, k = q.unflatten(-1, (site.heads, -1)), k.unflatten(-1, (site.groups, -1))
        q, k = (turned_heads(x, site.rotary.dims, *angles) for x in (q, k))
        self.seen = Turned(q, k, mask, causal)
        raise Enough


def dense_heads(model: nn.Module, site: AttentionSite, run: Callable[[], Any]) -> Turned:
    """Of the dense attention, as calibration takes them."""
    watcher = _Watcher([site], {})
    with watcher.hooks(model) as handles, suppress(Enough):
        handles += watcher.watch_queries(model, site)
        run()
    if watcher.seen is None:
        raise ModelError(f"nothing passed {site.name}: these batches do not reach it")
    return watcher.seen


def narrow_heads(model: nn.Module, site: AttentionSite, run: Callable[[], Any]) -> Turned:
    """Of the narrowed attention that stands in the model now: what it hands to the attention kernel."""
    module: Any = model.get_submodule(site.attention)
    seen: list[Turned] = []

    def attend(q: Tensor, k: Tensor, *_: Any) -> None:
        seen.append(Turned(q, k))
        raise Enough

    module._attend = attend  # in place of the class's method, which is back when this one is gone
    try:
        with suppress(Enough):
            run()
    finally:
        del module._attend
    return seen[0]


def logit_error(site: AttentionSite, dense: Turned, narrow: Turned, kept: int, *, weighted: bool) -> float:
    """Of the rotated dimensions, of which the narrowed heads keep so many: summed over heads, as the sums do."""
    rotary_dims, shared, total = site.rotary_dims, site.heads // site.groups, 0.0
    q, k = (torch.cat(pair, -1).double() for pair in ((dense.q, narrow.q), (dense.k, narrow.k)))
    for q_part, k_part in same_lengths(q, k.repeat_interleave(shared, dim=1), dense.mask):
        (q_old, q_new), (k_old, k_new) = (x.tensor_split([dense.q.shape[-1]], -1) for x in (q_part, k_part))
        asking = torch.cat([q_old[..., :rotary_dims], q_new[..., :kept]], -1)
        asked = torch.cat([k_old[..., :rotary_dims], -k_new[..., :kept]], -1)
        if not weighted:
            for block in query_blocks(asking, asked, *((PAIR_BLOCKS, site.window) if dense.causal else (1, None))):
                total += float((block.queries.mT @ block.queries * block.key_gram).sum())
            continue
        looked_at, hidden = looked_at_of(q_part.shape[2], dense.causal, site.window)
        logits = site.scale * q_old[:, :, looked_at] @ k_old.mT
        p = logits.masked_fill(hidden.to(logits.device), -torch.inf).softmax(-1)  # (B, H, M, n)
        wrong = asking[:, :, looked_at] @ asked.mT
        total += float(((p * wrong.square()).sum(-1) - (p * wrong).sum(-1).square()).sum())
    return total


def add_plain(grams: Grams, site: AttentionSite, dense: Turned, narrow: Turned, kept: int) -> None:
    """The dimensions that are not rotated: those of (q, q') with (k, -k'), as calibration sums logits."""
    shared = site.heads // site.groups
    q, k = (
        torch.cat([old[..., site.rotary_dims :], sign * new[..., kept:]], -1).transpose(1, 2)
        for old, new, sign in ((dense.q, narrow.q, 1), (dense.k, narrow.k, -1))
    )
    k = k.repeat_interleave(shared, dim=2)
    masks: dict[str, Any] = {"q_mask": dense.mask, "k_mask": dense.mask, "causal": dense.causal}
    grams.update(q.flatten(2), k.flatten(2), window=site.window, **masks)
