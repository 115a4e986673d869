"""The squared difference between logits of a narrowed and the dense attention, measured on data.

For dimensions that are not rotated it is summed over all logits, as in calibration; for rotated ones likewise or, if
pairs were chosen by attention-weighted cost, it is the variance of each row's difference under the dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.collector import Collector
from corp.calibration.grams import Grams
from corp.calibration.heads import Heads
from corp.calibration.hooks import removing
from corp.calibration.masks import bound
from corp.calibration.pairs import PAIR_BLOCKS, sampled_queries
from corp.calibration.query_blocks import query_blocks, same_lengths, with_key_grams
from corp.calibration.statistics import Statistics
from corp.calibration.threads import here
from corp.errors import ModelError
from corp.numerics import rotary
from corp.planning.site_plan import SitePlan
from corp.recipe import SUBSPACE
from corp.sites import AttentionSite


class _Watcher(Collector):
    """Records queries and keys as calibration sees them, call by call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[Heads] = []

    def add(self, site: AttentionSite, heads: Heads) -> None:
        q, k = heads.q.clone(), heads.k.clone()  # attention may scale them in place
        self.seen.append(heads._replace(q=q, k=k, scale=site.scale))


def heads_at(model: nn.Module, site: AttentionSite, run: Callable[[], Any]) -> list[Heads]:
    """The queries and keys of the attention at `site`, of every call in one forward pass."""
    watcher = _Watcher([site], {})
    with watcher.hooks(model) as handles:
        handles += watcher.watch_queries(model, site)
        run()
    if not watcher.seen:
        raise ModelError(f"no data reached {site.name} in these batches")
    return watcher.seen


def rotated_heads_at(model: nn.Module, site: AttentionSite, run: Callable[[], Any]) -> list[Heads]:
    """The queries and keys of a narrowed rotary attention, read after it has rotated them itself."""
    assert site.rotary is not None
    assert site.rotary.argument is not None
    argument, module = site.rotary.argument, model.get_submodule(site.attention)
    seen: list[Heads] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = bound(module, args, kwargs)
        q, k, _ = module.rotated(call["hidden_states"], call[argument])
        seen.append(Heads(q, k))

    with removing([module.register_forward_pre_hook(here(before), with_kwargs=True)]):
        run()
    return seen


class LogitErrors:
    """The squared difference of the logits of all heads, summed over batches."""

    def __init__(self, site: AttentionSite, site_plan: SitePlan, *, weighted: bool) -> None:
        self.site, self.weighted, self.centred = site, weighted, site_plan.basis == SUBSPACE
        self.rotary_width = int((site_plan.indices()[0] < site.rotary_dims).sum())  # rotated dimensions that are kept
        left = site_plan.keep - self.rotary_width
        if site.padded:  # zeros where something was removed
            self.rotary_width, left = site.rotary_dims, site.plain_width
        self.rotated = 0.0
        self.plain = Grams(site.heads, site.plain_width + left) if site.plain_width else None

    def add(self, dense: Heads, narrow: Heads) -> None:
        """Add the squared differences, which are the logits of (q, q') with (k, -k')."""
        site, old, new = self.site, self.site.rotary_dims, self.rotary_width
        q = dense.q, narrow.q
        k = [x.repeat_interleave(site.heads // site.groups, dim=1) for x in (dense.k, -narrow.k)]
        if site.rotary:
            self.rotated += self._rotated_error(q, k, dense)
        if self.plain is not None:
            joined = [torch.cat([x[0][..., old:], x[1][..., new:]], -1).double() for x in (q, k)]  # they cancel
            joined = [x.transpose(1, 2).flatten(2) for x in joined]
            masks: dict[str, Any] = {"q_mask": dense.q_mask, "k_mask": dense.k_mask, "causal": dense.causal}
            self.plain.update(*joined, window=site.window, **masks)

    def _rotated_error(self, q: tuple[Tensor, ...], k: list[Tensor], dense: Heads) -> float:
        site, total = self.site, 0.0
        q_all, k_all = (torch.cat(x, -1).double() for x in (list(q), k))
        for q_part, k_part in same_lengths(q_all, k_all, dense.q_mask):
            (q_old, q_new), (k_old, k_new) = (x.tensor_split([site.width], -1) for x in (q_part, k_part))
            asking = torch.cat([q_old[..., : site.rotary_dims], q_new[..., : self.rotary_width]], -1)
            asked = torch.cat([k_old[..., : site.rotary_dims], k_new[..., : self.rotary_width]], -1)
            if not self.weighted:
                blocks = query_blocks(asking, asked, *((PAIR_BLOCKS, site.window) if dense.causal else (1, None)))
                for queries, g_k in with_key_grams(blocks):
                    total += float((queries.mT @ queries * g_k).sum())
                continue
            sampled, hidden = sampled_queries(q_part.shape[2], dense.causal, site.window)
            logits = dense.scale * q_old[:, :, sampled] @ k_old.mT
            p = logits.masked_fill(hidden.to(logits.device), -torch.inf).softmax(-1)  # (B, H, M, n)
            wrong = asking[:, :, sampled] @ asked.mT
            total += float(((p * wrong.square()).sum(-1) - (p * wrong).sum(-1).square()).sum())
        return total

    @property
    def total(self) -> float:
        return self.rotated + (0.0 if self.plain is None else _energy_of(self.plain, self.centred))

    def energy(self, stats: Statistics) -> float:
        """The energy of the dense model's logits, computed in the same way."""
        total = 0.0
        if self.site.rotary:
            pairs = stats.pairs_of(self.site.name).total()
            total += sum(rotary.logit_energy(A) for A in (pairs.weighted if self.weighted else pairs.raw))
        if self.plain is not None:
            total += _energy_of(stats.grams_of(self.site.plain_name).total(), self.centred)
        return total


def _energy_of(grams: Grams, centred: bool) -> float:
    """The energy of all logits; if centred, up to a constant per row, which softmax ignores."""
    return sum(float(grams.head(h, centred=centred).energy().sum()) for h in range(grams.heads))
