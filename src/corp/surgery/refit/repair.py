"""Sequential fitting: the layers of a pruned model correct the errors of earlier ones.

The dense and the pruned residual stream go through the blocks side by side. After every layer that adds to the stream
they differ by a gap, which contains all errors so far, including the layer's own. The layer adds the part of the gap
that is linear in its input (numerics.refit); the next layer sees the remainder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import (
    Forward,
    enumerate_batches,
    evaluating,
    feed,
    first_samples,
    move,
    placement,
    run,
    without_cache,
)
from corp.calibration.holdout import HoldOut
from corp.calibration.hooks import removing, without_fast_path
from corp.calibration.moments import shift_of
from corp.calibration.threads import here
from corp.errors import DataError, ModelError, PlanError, warn
from corp.io.observer import Advance
from corp.numerics.affine import Folded
from corp.numerics.place import Place
from corp.recipe import Recipe
from corp.sites import AttentionSite, LinearSite, Sites, at_site, projection_at
from corp.surgery.refit.blocks import examine
from corp.surgery.refit.gaps import TokenSums
from corp.surgery.refit.layer import added, correct_layer, read_share, split_rows, tokens_of
from corp.surgery.refit.readout import tokens_read
from corp.surgery.refit.replay import (
    Block,
    Passage,
    Run,
    close,
    drive,
    meeting,
    record_calls,
    refusal,
    stream_of,
    watching,
)
from corp.surgery.refit.shortcuts import Shortcuts, finding, has_shortcut, taking

EXAMINED = 2  # samples on which the blocks are found


def why_not(
    model: nn.Module, sites: Sites, recipe: Recipe, batches: Iterable[Any] | None, forward: Forward | None = None
) -> tuple[list[Block], str]:
    """The model's blocks, or why it is not refitted; sequential=True makes the reason an error, before long work."""
    if not recipe.refits:
        return [], ""
    try:
        return find_blocks(model, sites, recipe, batches, forward), ""
    except (PlanError, DataError) as error:
        if recipe.sequential is True:
            error.args = (f"sequential=True: {error}",)
            raise
        return [], str(error)


def find_blocks(
    model: nn.Module, sites: Sites, recipe: Recipe, batches: Iterable[Any] | None, forward: Forward | None = None
) -> list[Block]:
    """The model's blocks, found with one batch; what cannot be refitted is refused here, before the long work."""
    if batches is None:
        raise DataError("the refit reads the data itself, not its statistics: give batches, or sequential=False")
    if isinstance(batches, Iterator):
        raise DataError("the refit reads the data twice: give batches as a list or a loader, not an iterator")
    device, dtype = placement(model)
    first = next((batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0)), None)
    if first is None:
        raise DataError("no calibration data: `batches` was empty")
    batch = first if forward is not None else move(first_samples(first, EXAMINED), device, dtype)
    with without_cache(model):
        blocks = examine(model, list(sites), lambda: run(model, batch, forward))
        blocks = tokens_read(model, blocks, lambda: run(model, batch, forward))
    _require_inside(sites, recipe, blocks)
    return blocks


def _require_inside(sites: Sites, recipe: Recipe, blocks: Sequence[Block]) -> None:
    known = {site.name for block in blocks for site in block.sites}
    for site in sites:
        asked = recipe.has_target or recipe.sparsity(site.kind, site.name) > 0
        if not isinstance(site, AttentionSite) and site.name not in known and asked and not recipe.skips(site.name):
            raise refusal(f"{site.name} is not in a block that the data passes; or leave it alone with skip=[...]")


@dataclass
class Repair:
    """The dense model and the pruned one, which is changed in place; `corrected` records the corrected layers."""

    dense: nn.Module
    smaller: nn.Module
    recipe: Recipe
    place: Place | None = None  # where systems are solved; by default where the layer is
    forward: Forward | None = None  # how the models are called, as in `prune`
    corrected: dict[str, dict[str, float]] = field(default_factory=dict)
    few: list[str] = field(default_factory=list)

    def run(self, blocks: Sequence[Block], passages: Sequence[Passage], advance: Advance) -> Tensor:
        """Refit block after block, in the order of the data; returns the final stream of the first passage."""
        dense: list[Tensor] = []
        pruned: list[Tensor] = []
        for block in blocks:
            if block.starts:
                dense = [passage.starts.pop(block.name) for passage in passages]
                pruned = self._fed_starts(block, blocks, passages) if block.fed else list(dense)
            dense = self.correct_block(block, passages, dense, pruned)
            advance(1)
        warn_of_few(self.few)
        return pruned[0]

    def _fed_starts(self, first: Block, blocks: Sequence[Block], passages: Sequence[Passage]) -> list[Tensor]:
        """Record how the pruned model calls a chain that is fed by earlier ones; returns what the chain starts with."""
        names, starts = [block.name for block in blocks], []
        with without_cache(self.smaller):
            for passage in passages:
                found = record_calls(self.smaller, names, partial(feed, self.smaller, passage.batch, self.forward))
                passage.fed = found.calls
                starts.append(found.starts[first.name])
        return starts

    def correct_block(
        self, block: Block, passages: Sequence[Passage], dense: list[Tensor], pruned: list[Tensor]
    ) -> list[Tensor]:
        """Correct the block's layers one by one; advances `pruned` past the block, and returns `dense` past it."""
        behind: list[Tensor] = []  # the dense stream
        targets: list[dict[str, Tensor]] = []
        for passage, hidden in zip(passages, dense, strict=True):
            with watching(self.dense, block.sites) as seen, meeting(self.dense, block.junctions) as met:
                behind.append(drive(self.dense, block.name, passage.calls[block.name], hidden))
            targets.append({**{name: one.y for name, one in seen.items()}, **met})
        ends: list[tuple[Tensor, Tensor]] = []
        change: Folded | None = None
        shortcuts: list[Shortcuts] = [{} for _ in passages]
        for number, site in enumerate(block.sites):
            if not self.recipe.skips(site.name):
                with at_site(site):
                    fit, held, ends = self._observe(block, number, passages, dense, pruned, targets, behind, shortcuts)
                    change = self._correct(site, block.scales[number], fit, held)
        if ends:  # the block ran to its end: the effect of its last layer's correction is added without another pass
            pruned[:] = [output if change is None else added(output, x, *change) for output, x in ends]
            return behind
        for i, passage in enumerate(passages):
            with taking(self.smaller, shortcuts[i]):
                pruned[i] = drive(self.smaller, block.name, passage.pruned_call(block.name), pruned[i])
        return behind

    def _observe(
        self,
        block: Block,
        number: int,
        passages: Sequence[Passage],
        dense: Sequence[Tensor],
        pruned: Sequence[Tensor],
        targets: Sequence[dict[str, Tensor]],
        behind: Sequence[Tensor],
        shortcuts: Sequence[Shortcuts],
    ) -> tuple[TokenSums, TokenSums, list[tuple[Tensor, Tensor]]]:
        """The sums of the input of a site's layer in the pruned model and of the gap after it: fitted, held out.

        If the fit has no intercept, tokens are weighted by the inverse size of their stream, as the next norm divides
        by it; otherwise the first token of a text, which may be a thousand times as large, would dominate the fit.
        If the site is the last that adds to the stream, the block's output and that layer's input are returned too.
        Attentions take the shortcuts of earlier passes, and this pass adds its own.
        """
        site = block.sites[number]
        last = number == len(block.sites) - 1 and not block.junctions
        layer = projection_at(self.smaller, site.down)
        inputs = layer.weight.shape[1]
        fit, held = (TokenSums(inputs, dense[0].shape[-1], read_share(block)) for _ in range(2))
        ends, rule = [], HoldOut(sum(passage.samples for passage in passages))
        own = block.junctions[number : number + 1]
        stop, shorter = not last and not own, has_shortcut(site)
        for passage, ahead, hidden, target, after, known in zip(
            passages, dense, pruned, targets, behind, shortcuts, strict=True
        ):
            with (
                taking(self.smaller, known),
                watching(self.smaller, block.sites, inputs=site.name, stop=stop and not shorter) as seen,
                finding(self.smaller, site, stop=stop) as found,
                meeting(self.smaller, own, stop=True) as met,
            ):
                output = drive(self.smaller, block.name, passage.pruned_call(block.name), hidden)
            known |= found
            if own:
                gap = tokens_of(target[own[0]]) - tokens_of(met[own[0]])
            else:
                gap = tokens_of(ahead) - tokens_of(hidden)
                for one, scale in zip(block.sites[: number + 1], block.scales, strict=False):
                    gap.addcmul_(scale.to(gap), tokens_of(target[one.name]) - tokens_of(seen[one.name].y))
            x = seen[site.name].x
            assert x is not None
            if last:
                ends.append((output, x))
            x = x.reshape(-1, x.shape[-1])
            if layer.bias is None:
                weight = 1 / tokens_of(after).norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
                x, gap = tokens_of(x) * weight, gap * weight
            if not passage.first:
                fit.shift_by(shift_of(x))
                held.shift_by(shift_of(x))
            for sums, rows in zip((fit, held), split_rows(block, passage, hidden, rule), strict=True):
                sums.update(x, gap, *rows)
        return fit, held, ends

    def _correct(self, site: LinearSite, scale: Tensor, fit: TokenSums, held: TokenSums) -> Folded | None:
        """Correct the layer, and return the change of what it adds to the stream."""
        made = correct_layer(self.smaller, site, scale, fit, held, self.place)
        if made is None:
            return None
        if fit.n + held.n < 2 * len(fit.read.total):
            self.few.append(site.name)
        self.corrected[site.name] = made.record
        return made.change


def warn_of_few(sites: Sequence[str]) -> None:
    """Warn that these sites were refitted on too little data, if there are any."""
    if sites:
        warn(
            f"{sites[0]} (of {len(sites)}) was fitted sequentially on fewer tokens than twice its inputs; use more "
            f"sequential_samples, and more calibration data"
        )


def require_whole(
    model: nn.Module, blocks: Sequence[Block], expected: Tensor, run_model: Run, share: float = 1.0
) -> None:
    """Require that the refitted model, run as a whole, reproduces the final stream of the refit.

    With a `share` below one, that share of the samples must.
    """
    found: list[Tensor] = []
    last = blocks[-1]
    hook = model.get_submodule(last.name).register_forward_hook(
        here(lambda _m, _a, output: found.append(stream_of(output)))
    )
    with torch.no_grad(), evaluating(model), without_fast_path(), removing([hook]):
        run_model()
    if not found or not _agree(found[0], expected, len(blocks), share):
        raise ModelError(
            f"self-check: the refitted model does not reproduce its refit ({last.name}). The model is not "
            "returned: this is a defect of corp, or hooks or wrappers changed the weights on the way; please report it"
        )


def _agree(found: Tensor, expected: Tensor, blocks: int, share: float) -> bool:
    if share == 1 or found.shape != expected.shape:
        return close(found, expected, blocks)
    return sum(close(*pair, blocks) for pair in zip(found, expected, strict=True)) >= share * len(found)
