"""Sequential fitting: every layer is fitted on what the pruned layers before it feed it, and makes up for their errors.

Two streams go through the blocks side by side: the dense model's, and that of the model as far as it is pruned. Behind
every layer that adds to the stream the pruned one lags by a gap. The layer takes over the part of the gap that is
linear in its input (numerics.refit), and what it then does is pruned as ever, from the moments of that input.
"""

from __future__ import annotations

import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from corp.batches import Forward, enumerate_batches, move, placement, run, size_of, without_cache
from corp.errors import CorpWarning, DataError, PlanError
from corp.folding import apply_sites, in_float64
from corp.numerics.affine import Folded
from corp.numerics.refit import Correction, choose_ridge, fit_gap
from corp.plan import SitePlan
from corp.planning.linear import plan_mlp, plan_values, uses_intercept
from corp.recipe import Recipe
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, Sites, ValueSite, at_site
from corp.stats import Moments, SiteSums, Statistics
from corp.stats.collect import block_of
from corp.stats.gaps import GapSums
from corp.stats.memory import free_bytes, human
from corp.stats.moments import shift_of
from corp.streams import Block, Passage, drive, examine, inside, record, refusal, watching
from corp.surgery.linear import Projection, projection_at, refill

SAMPLES, TOKENS = 512, 131_072  # that the streams hold where the recipe does not say: whichever is fewer
HOLD_OUT_EVERY, HOLD_OUT_AT = 5, 2  # samples 2, 7, 12 … choose how far a layer is corrected
STREAMS = 4  # hidden states held of every sample, beside the outputs of a block's sites


def require_sequential(
    model: nn.Module, sites: Sites, recipe: Recipe, batches: Iterable[Any], forward: Forward | None = None
) -> list[Block]:
    """The model's blocks, from one batch; what cannot be fitted sequentially is refused here, before long work."""
    if isinstance(batches, Iterator):
        raise DataError("sequential fitting reads the data twice: give batches as a list or a loader, not an iterator")
    device, dtype = placement(model)
    first = next((batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0)), None)
    if first is None:
        raise DataError("no calibration data: `batches` was empty")
    batch = _moved(first, device, dtype, forward)
    with without_cache(model):
        blocks = examine(model, list(sites), lambda: run(model, batch, forward))
    _require_inside(sites, recipe, blocks)
    return blocks


def _require_inside(sites: Sites, recipe: Recipe, blocks: Sequence[Block]) -> None:
    known = {site.name for block in blocks for site in block.sites}
    for site in sites:
        asked = recipe.has_target or recipe.sparsity(site.kind, site.name) > 0
        if not isinstance(site, AttentionSite) and site.name not in known and asked and not recipe.skips(site.name):
            raise refusal(f"{site.name} is not in a block that the data passes; or leave it alone with skip=[...]")


def record_batches(
    model: nn.Module,
    sites: Sites,
    batches: Iterable[Any],
    blocks: Sequence[Block],
    recipe: Recipe,
    available: int,
    forward: Forward | None = None,
) -> list[Passage]:
    """Run the dense model over some batches, spread over all `available` samples, and record its blocks' calls."""
    wanted = recipe.sequential_samples or min(SAMPLES, math.ceil(TOKENS / max(block.tokens for block in blocks)))
    every = max(1, available // wanted)
    device, dtype = placement(model)
    passages: list[Passage] = []
    seen = 0
    for _, _, batch in enumerate_batches(batches, lambda index: index % every == 0):
        moved = _moved(batch, device, dtype, forward)
        with without_cache(model):
            passage = record(model, list(sites), lambda moved=moved: run(model, moved, forward))  # type: ignore[misc]
        if list(passage.calls) != [block.name for block in blocks]:
            raise refusal("its blocks run in another order from batch to batch")
        passage.first = seen
        passages.append(passage)
        if not seen:
            _require_memory(passage, blocks, min(wanted, available) / size_of(batch), device)
        seen += size_of(batch)
        if seen >= wanted:
            break
    return passages


def _require_memory(passage: Passage, blocks: Sequence[Block], batches: float, device: torch.device) -> None:
    outputs = max(len(block.sites) for block in blocks)
    size = max(x.numel() * x.element_size() for x in passage.starts.values())
    need, free = int(size * batches * (STREAMS + outputs)), free_bytes(device)
    if need > free:
        raise PlanError(
            f"the hidden states of sequential fitting need {human(need)}, {human(free)} are free; "
            "give it fewer samples with sequential_samples (--sequential-samples)"
        )


def _moved(batch: Any, device: torch.device, dtype: torch.dtype, forward: Forward | None) -> Any:
    return batch if forward is not None else move(batch, device, dtype)


@dataclass
class Fit:
    """The dense model and the one being pruned, which is changed in place; `widths` says how wide every site stays.

    `queries`: the plans of queries and keys, which are made from the dense model's statistics.
    """

    dense: nn.Module
    smaller: nn.Module
    sites: Sites
    widths: dict[str, int]
    queries: dict[str, SitePlan]
    stats: Statistics
    recipe: Recipe
    planned: dict[str, SitePlan] = field(default_factory=dict)
    few: list[str] = field(default_factory=list)

    def run(
        self, blocks: Sequence[Block], passages: Sequence[Passage], progress: Callable[[int], None] | None = None
    ) -> list[SitePlan]:
        """Prune block after block; the plans of all sites that change, in their order."""
        inside_blocks = {block.name for block in blocks}
        self._narrow_queries([s for s in self.sites.attention if block_of(inside(s)) not in inside_blocks])
        dense: list[Tensor] = []
        pruned: list[Tensor] = []
        for block in blocks:
            if block.starts:
                dense = [passage.starts.pop(block.name) for passage in passages]
                pruned = list(dense)
            dense = self._fit_block(block, passages, dense, pruned)
            if progress:
                progress(1)
        if self.few:
            message = (
                f"{self.few[0]} (of {len(self.few)}) was fitted sequentially on fewer tokens than twice its inputs"
            )
            warnings.warn(
                f"{message}; give it more sequential_samples, and calibrate on more", CorpWarning, stacklevel=3
            )
        return [self.planned[site.name] for site in self.sites if site.name in self.planned]

    def _fit_block(
        self, block: Block, passages: Sequence[Passage], dense: list[Tensor], pruned: list[Tensor]
    ) -> list[Tensor]:
        """Fit the block's layers in the order of the data; moves `pruned` past it, and returns `dense` past it."""
        attentions = [s for s in self.sites.attention if block_of(inside(s)) == block.name]
        whole = {site.name: self.smaller.get_submodule(site.attention) for site in attentions}
        self._narrow_queries(attentions)
        behind: list[Tensor] = []
        targets: list[dict[str, Tensor]] = []
        for passage, hidden in zip(passages, dense, strict=True):
            with watching(self.dense, block.sites) as seen:
                behind.append(drive(self.dense, block.name, passage.calls[block.name], hidden))
            targets.append({name: one.y for name, one in seen.items()})
        for number, site in enumerate(block.sites):
            if self.recipe.skips(site.name):
                continue
            with at_site(site):
                parts = self._observe(block, number, passages, dense, pruned, targets)
                self._fit_site(site, block.scales[number], *parts, whole)
        for i, passage in enumerate(passages):
            pruned[i] = drive(self.smaller, block.name, passage.calls[block.name], pruned[i])
        return behind

    def _narrow_queries(self, attentions: Sequence[AttentionSite]) -> None:
        for site in attentions:
            if site.name in self.queries:
                with at_site(site):
                    apply_sites(self.smaller, [(site, self.queries[site.name])], self.stats, self.recipe)
                self.planned[site.name] = self.queries[site.name]

    def _observe(
        self,
        block: Block,
        number: int,
        passages: Sequence[Passage],
        dense: Sequence[Tensor],
        pruned: Sequence[Tensor],
        targets: Sequence[dict[str, Tensor]],
    ) -> tuple[GapSums, GapSums]:
        """The sums of what a site's layer is fed in the pruned model, and of the gap behind it: fitted, held out."""
        site = block.sites[number]
        fit, held = (GapSums(site.inputs, dense[0].shape[-1]) for _ in range(2))
        for passage, ahead, hidden, target in zip(passages, dense, pruned, targets, strict=True):
            with watching(self.smaller, block.sites, inputs=site.name) as seen:
                drive(self.smaller, block.name, passage.calls[block.name], hidden)
            gap = _tokens(ahead) - _tokens(hidden)
            for one, scale in zip(block.sites[: number + 1], block.scales, strict=False):
                gap += scale.to(gap) * (_tokens(target[one.name]) - _tokens(seen[one.name].y))
            x = seen[site.name].x
            assert x is not None
            x = x.reshape(-1, x.shape[-1])
            if fit.inputs.shift is None:
                fit.inputs.shift, held.inputs.shift = shift_of(x), shift_of(x)
            for sums, rows in zip((fit, held), _rows(block, passage, hidden), strict=True):
                sums.update(x[rows], gap[rows])
        return fit, held

    def _fit_site(
        self, site: LinearSite, scale: Tensor, fit: GapSums, held: GapSums, whole: dict[str, nn.Module]
    ) -> None:
        """Correct the layer, and narrow it if it shall be; all in units of the stream, to which it is added scaled."""
        keep = self.widths[site.name]
        W, b = in_float64(projection_at(self.smaller, site.down))
        has_bias = projection_at(self.smaller, site.down).bias is not None
        intercept = uses_intercept(self.recipe, has_bias) if keep < site.width else has_bias
        fix = correction(fit, held, intercept, self.recipe)
        if fix is None and keep == site.width:
            return
        W, b = scale[:, None] * W, scale * b
        if fix is not None:
            W, b = W + fix.R, b + fix.c
        bias = has_bias or intercept
        if keep < site.width:
            self._narrow(site, keep, Folded(W, b), SiteSums(fit.inputs, held.inputs), whole, bias=bias)
            W, b = in_float64(projection_at(self.smaller, site.down))
        back = torch.where(scale == 0, 1.0, scale)
        refill(self.smaller, site.down, Folded(W / back[:, None], b / back), bias=bias)

    def _narrow(
        self,
        site: LinearSite,
        keep: int,
        layer: Folded,
        sums: SiteSums[Moments],
        whole: dict[str, nn.Module],
        *,
        bias: bool,
    ) -> None:
        if 0 < sums.fit.n + sums.held.n < 2 * site.inputs:
            self.few.append(site.name)
        group: list[tuple[Site, SitePlan]] = []
        if isinstance(site, ValueSite) and site.attention in self.queries:
            # Queries and keys were narrowed to see what values do then; now both are, together, from the dense module.
            self.smaller.set_submodule(site.attention, whole[site.attention])
            group.append((self.sites[site.attention], self.queries[site.attention]))
        refill(self.smaller, site.down, layer, bias=bias)
        down = Projection(layer.W, layer.b if projection_at(self.dense, site.down).bias is not None else None)
        if isinstance(site, MLPSite):
            plan = plan_mlp(site, keep, down, sums, self.recipe)
        else:
            plan = plan_values(site, keep, down, sums, self.recipe)
        own: Any = ChainMap({site.name: sums}, self.stats.sums)  # type: ignore[arg-type]
        stats = replace(self.stats, sums=own)
        stats.fits = self.stats.fits
        apply_sites(self.smaller, [*group, (site, plan)], stats, self.recipe)
        self.planned[site.name] = plan


def correction(fit: GapSums, held: GapSums, intercept: bool, recipe: Recipe) -> Correction | None:
    """What the layer shall add to its output: as much as the held-out samples say; None for nothing."""
    both = fit + held
    if both.square == 0:
        return None
    ridge: float | None = recipe.ridge_given
    if fit.inputs.n and held.inputs.n:
        ridge = choose_ridge(fit.moments(intercept), held.moments(intercept))
    return None if ridge is None else fit_gap(both.moments(intercept), ridge)


def _tokens(x: Tensor) -> Tensor:
    """(T, C), in float32 at least."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.dtype == torch.float64 else x.float()


def _rows(block: Block, passage: Passage, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens of the stream, flattened, are fitted and which are held out; padding is neither."""
    samples, tokens = hidden.shape[:2] if block.batch_first else hidden.shape[1::-1]
    number = passage.first + torch.arange(samples, device=hidden.device)
    held = (number % HOLD_OUT_EVERY == HOLD_OUT_AT)[:, None].expand(samples, tokens)
    masks = [mask for site in block.sites if (mask := passage.masks.get(site.mask)) is not None]  # type: ignore[arg-type]
    real = masks[0].to(hidden.device) if masks else torch.ones_like(held)
    if real.shape != held.shape:
        raise PlanError(f"the mask has shape {tuple(real.shape)}, the hidden states {tuple(held.shape)}")

    def rows(chosen: Tensor) -> Tensor:
        return (chosen if block.batch_first else chosen.mT).reshape(-1)

    return rows(real & ~held), rows(real & held)
